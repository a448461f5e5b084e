"""What was asked for, what was measured of it, and whether that is near enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from bench.rig.output import Output
from bench.rig.table import layout
from common.results.shipped import MISSED


class Case:
    """One thing that is asked for, what was measured of it, and how far that is off.

    Attributes:
        cells: of the row below `header`.
    """

    bar_percent: ClassVar[float]
    header: ClassVar[tuple[str, ...]]
    judged = True
    off_percent: float
    cells: Callable[[], list[str]]

    @property
    def verdict(self) -> str:
        """`ok`, or `MISSED` if further off than the bar in either direction."""
        if not self.judged:
            return "not judged"
        return "ok" if abs(self.off_percent) <= self.bar_percent else "MISSED"


def table(kind: type[Case], cases: Sequence[Case]) -> str:
    """A row per case, and its verdict."""
    header = [*kind.header, f"bar {kind.bar_percent:g} %"]
    return layout(header, [[*case.cells(), case.verdict] for case in cases])


@dataclass(frozen=True)
class Check:
    """The cases of one run: kept after each round, printed and judged at its end."""

    what: str
    kind: type[Case]
    output: Output

    def save(self, cases: Sequence[Case], **values: Any) -> None:
        """Keeps the cases and values, with where they were measured."""
        about = self.output.about(f"bench/{self.what}")
        self.output.save({**about, "cases": [vars(case) for case in cases], **values})

    def end(self, cases: Sequence[Case], *remarks: str, failures: Sequence[str] = ()) -> int:
        """Prints the table; the exit status: whether all that is judged is within the bar."""
        print("\n".join([*self.output.heading(), *remarks, table(self.kind, cases), *failures]))
        return 1 if failures else status(cases)


def status(cases: Sequence[Case]) -> int:
    """The exit status of a program that has measured all of them."""
    return MISSED if any(case.verdict == "MISSED" for case in cases) else 0
