"""ImageNet and data sets laid out like it: folders of image files, or shards of TFRecords, read where they lie."""
