"""Order, shares and position of samples; loader workers; TFRecord files."""
