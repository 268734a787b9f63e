"""A network into stages: its forward written down, cut, and balanced by measured cost."""
