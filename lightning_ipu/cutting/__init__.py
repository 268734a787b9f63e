"""Cut a network into stages: trace its forward, cut it, balance the stages by measured cost."""
