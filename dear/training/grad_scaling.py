"""`GradScaling`, where it was; it is in `dear.training.engine`."""

from dear.training.engine import GradScaling

__all__ = ["GradScaling"]
