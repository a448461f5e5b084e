"""`Engine`, by the name that it had for a world of one; give `distribute` a maker instead."""

from dear.training.engine import Engine as AloneEngine

__all__ = ["AloneEngine"]
