"""Small-image data sets (CIFAR-10, CIFAR-100, MNIST, Fashion-MNIST) and the embedded sample."""
