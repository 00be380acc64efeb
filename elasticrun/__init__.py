"""elasticrun: an elastic launcher for distributed PyTorch that takes the place of torchrun."""

__version__ = "0.1.0"
