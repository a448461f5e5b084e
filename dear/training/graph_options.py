"""Options of the algorithms that average over a graph."""

from dear.training.parameters import BUCKET_MB, GraphOptions, always

__all__ = ["BUCKET_MB", "GraphOptions", "always"]
