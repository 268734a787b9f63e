"""The precisions: 32.32, 16.32 and 16.16, stochastic rounding and loss scaling."""
