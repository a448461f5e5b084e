"""`Bucket`, by the name that it had for watching gradients only."""

from dear.buckets.flat import Bucket as Unchanged
from dear.buckets.flat import refuse_changed

__all__ = ["Unchanged", "refuse_changed"]
