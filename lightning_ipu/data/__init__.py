"""Order, shards and position of samples; loader workers; TFRecord files."""
