"""Training that updates locally and averages parameters with other ranks."""
