"""CosmoFlow: from the three-dimensional distribution of matter to the parameters of the universe."""
