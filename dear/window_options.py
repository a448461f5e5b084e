"""Options of the algorithms that exchange through one-sided windows."""

from __future__ import annotations

from dataclasses import dataclass

from dear.graph_options import GraphOptions
from dear.options import at_least, option_of


@dataclass(frozen=True, kw_only=True)
class WindowOptions(GraphOptions):
    """The topology, and how asynchronous it is."""

    barrier: bool = False
    """Waits for all ranks in each step that exchanges, so that results do not depend on timing; for
    comparisons."""
    every: int = 1
    """Exchanges in each so many steps only, the last of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(option_of(self, "every"), self.every, 1)
