"""Summary of a comparison of two sweeps: which trials of the second are worse (`--fail-on`)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.results.records import Record
from common.results.timed import compare
from common.results.timed.compare import Pair

SCHEMA = 1
Outcome = Literal["compared", "worse", "nothing compared"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Comparison of two sweeps; its JSON has the schema `compare.schema.json`."""

    schema: int = SCHEMA
    first: str
    """Names of the sweeps, as the user gave them."""
    second: str
    across: list[str]
    """Keys in which the trials of a pair may differ."""
    fail_on: str | None
    outcome: Outcome
    """`worse`: at least one pair fails. `nothing compared`: no pair has a ratio."""
    compared: int
    geometric_mean: float | None
    verdicts: dict[str, int]
    pairs: list[Pair]
    """One for each trial of the first sweep."""
    unmatched: int
    """Number of trials of the second sweep without a counterpart in the first."""
    unmatched_reason: str | None
    environment: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Lines about the pairs that fail, and a last line with the outcome."""
        lines = []
        if self.fail_on is not None:
            lines = [f"{p.worse}: {p.where}, {name(p)}: {text(p)}" for p in self.pairs if p.worse]
        if self.outcome == "nothing compared":
            lines.append(f"nothing was compared: {self.why}")
        if self.fail_on is None:
            return lines
        counts = {"compared": self.compared}
        counts |= Counter(pair.worse for pair in self.pairs if pair.worse)
        counts["not valid before"] = sum(not (pair.ratio or pair.worse) for pair in self.pairs)
        state = "FAILED" if self.outcome != "compared" else "passed"
        line = f"--fail-on {self.fail_on}: {state}: "
        line += ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        unsure = self.verdicts.get("UNSURE")
        return [*lines, line + (f" ({unsure} UNSURE: they may be slower)" if unsure else "")]

    @property
    def why(self) -> str:
        """Reason why nothing was compared."""
        return self.unmatched_reason or "no pair has two valid trials"


def name(pair: Pair) -> str:
    """Returns batch size, algorithm and differing keys of a pair as a text."""
    return ", ".join(filter(None, (f"batch {pair.batch_size}", pair.algorithm, pair.across)))


def text(pair: Pair) -> str:
    """Returns the result of a pair in one line, or the reason why it has none."""
    if pair.ratio is None:
        return " ".join((pair.reason or "").split())
    ends = "" if pair.ratio_low is None else f" ({pair.ratio_low:.3f}-{pair.ratio_high:.3f})"
    return f"{pair.ratio:.3f}x{ends} {pair.verdict}"


def summarize(
    names: tuple[str, str],
    before: Sequence[Record],
    after: Sequence[Record],
    *,
    across: Sequence[str] = (),
    fail_on: str | None = None,
    share: float | None = None,
    other_labels: bool = True,
) -> Summary:
    """Compares two sweeps.

    Args:
        names: names of the sweeps.
        share: largest loss of throughput that does not fail, as a fraction; None: no limit.
        across, other_labels: as for `compare.pairs`.
    """
    matched = compare.pairs(before, after, across, other_labels=other_labels)
    pairs, count = compare.rows(matched, across), sum(second is not None for _, second in matched)
    for i, pair in enumerate(pairs if share is not None else ()):
        if pair.verdict == "SLOWER" and pair.ratio is not None and pair.ratio < 1 - share:
            pairs[i] = dataclasses.replace(pair, worse="slower")
    mean = compare.geometric_mean(pairs)
    fails = share is not None and any(pair.worse for pair in pairs)
    outcome: Outcome = "worse" if fails else "compared"
    return Summary(
        first=names[0],
        second=names[1],
        across=list(across),
        fail_on=fail_on,
        outcome=outcome if mean else "nothing compared",
        compared=mean[1] if mean else 0,
        geometric_mean=mean and mean[0],
        verdicts=dict(Counter(pair.verdict for pair in pairs if pair.verdict)),
        pairs=pairs,
        unmatched=len(after) - count,
        unmatched_reason=None if count else compare.why_unmatched(before, after, across),
        environment=compare.environment(before, after),
    )
