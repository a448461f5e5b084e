"""`BackwardSchedule`, where it was; it is in `dear.training.gradients`."""

from dear.training.gradients import BackwardSchedule

__all__ = ["BackwardSchedule"]
