"""ResNet and ResNeXt image classifiers, trained under the IPU execution model."""
