"""Why to doubt a trial's number, in words: what of its machine, its course and its steps says so.

The word before the colon is fixed; `common.results.faith` and readers of records go by it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from common.results.records.trust import Strain

UNFAITHFUL_WAIT = 0.7
"""Seconds that a rank's threads may wait for a core per second, all together, on an emulated
cluster. Far from nothing, for queues of links and the deadlines of replayed compute absorb most of
it: see docs/methodology.md for the runs that it was chosen by."""
LATE = 0.02
"""The same for real compute, as a share of the time: nothing absorbs what it computes longer; and
what a replay may fall behind its device, the mean of all launches."""
SHORT_OF_CORES = 0.02
"""The same for the training threads of ranks that emulate nothing: it is worth a word."""
FOREIGN_CORES = 0.25
STEAL_CORES = 0.05
THROTTLED_S = 0.01
"""More of these makes a number doubtful: cores, and seconds of this machine."""
CANARY_OFF = 0.03
"""The same work in so much more or less time, relative, is not worth a word on any machine."""
LEAST_CANARIES = 5
"""So many launches tell what the machine is like, and how steady."""
TRANSIENT = 0.03
"""The first period of blocks may differ so much from the others, relative."""
TRANSIENT_ALPHA = 0.05 / 20
"""Of a row, so that no more than one table of 20 rows in 20 has one by chance (Bonferroni)."""


def unfaithful(strain: Sequence[Strain]) -> bool | None:
    """Whether an emulated trial's ranks waited for cores that a real cluster would have had.

    None where the kernel does not tell.
    """
    waits = [one.core_wait for one in strain]
    if not waits or None in waits:
        return None
    return max(waits) > UNFAITHFUL_WAIT or max(_late(strain), _behind(strain)) > LATE


def _late(strain: Sequence[Strain]) -> float:
    return max((one.late for one in strain if one.late is not None), default=0.0)


def _behind(strain: Sequence[Strain]) -> float:
    return statistics.fmean(one.fell_behind for one in strain)


def unfaithful_note(strain: Sequence[Strain]) -> str:
    """What to say of an unfaithful trial."""
    if _late(strain) > LATE:
        return (
            f"unfaithful: a rank computed {_late(strain):.0%} of the time longer, for lack of cores"
        )
    if _behind(strain) > LATE:
        return (
            f"unfaithful: hosts fell behind their devices by {_behind(strain):.0%} of the time, "
            "for lack of cores"
        )
    wait = max(one.core_wait for one in strain)
    return f"unfaithful: for lack of cores a rank's threads waited {wait:.2f} s per second in all"


def oversubscribed(strain: Sequence[Strain], crowded: str | None) -> str | None:
    """What to say where real ranks had fewer cores than threads that wanted one.

    It is no doubt: the machine that the ranks run on is the one whose number was asked for. Only
    the threads that train are looked at: of others (NCCL's, a pool's that spins) many may wait and
    hold up nothing.

    Args:
        crowded: what was asked for, if that alone is more than there is.
    """
    waits = [one.main_wait for one in strain if one.main_wait is not None]
    said = [crowded] if crowded else []
    if max(waits, default=0.0) > SHORT_OF_CORES:
        said.append(f"a rank's training thread waited {max(waits):.0%} of the time for a core")
    return f"oversubscribed: {'; '.join(said)}" if said else None


def disturbed(strain: Strain) -> str | None:
    """Who else had cores of the machine during one repeat; None: nobody."""
    if strain.foreign_cores > FOREIGN_CORES:
        return f"disturbed: other processes used {strain.foreign_cores:.1f} cores meanwhile"
    if strain.steal_cores > STEAL_CORES:
        return f"disturbed: other virtual machines took {strain.steal_cores:.2f} cores meanwhile"
    if strain.throttled_s > THROTTLED_S:
        return (
            f"disturbed: a limit of the control group stopped ranks for {strain.throttled_s:.2g} s"
        )
    return None


def off_course(canary_s: Sequence[float], earlier: Sequence[Sequence[float]]) -> str | None:
    """What was amiss with the machine beside how it was in other launches; None: nothing.

    On a machine whose pace is never steady, as one that shares its host with others, this finds
    only what stands out; the rest is part of every number, and of its interval.

    Args:
        canary_s: what the fixed work took before and after, in seconds.
        earlier: the same of other launches.
    """
    if len(earlier) < LEAST_CANARIES:
        return None
    paces = [math.log(statistics.fmean(pair)) for pair in earlier]
    usual = statistics.median(paces)
    off = math.log(statistics.fmean(canary_s)) - usual
    if abs(off) > _stands_out([pace - usual for pace in paces]):
        return f"disturbed: the same work took {math.expm1(off):+.0%} time beside other launches"
    change = _change(canary_s)
    if abs(change) > _stands_out([_change(pair) for pair in earlier]):
        return f"disturbed: the same work took {math.expm1(change):+.0%} time afterwards"
    return None


def _change(canary_s: Sequence[float]) -> float:
    before, after = canary_s
    return math.log(after / before)


def _stands_out(logs: Sequence[float]) -> float:
    """More than three deviations, which their median tells if they are normal."""
    spread = 1.4826 * statistics.median(map(abs, logs))
    return max(math.log1p(CANARY_OFF), 3 * spread)


def not_stationary(iters: Sequence[Sequence[Sequence[float]]], period: int) -> str | None:
    """A note if blocks do not begin as they go on, by more than the noise between them explains.

    The first period of each block is held against the rest of it. With fewer than three blocks the
    spread of the periods in a block says how much one of them may be off.

    Args:
        iters: step times by repeat and block.
        period: steps of the algorithm's schedule.
    """
    blocks = [_periods(block, period) for repeat in iters for block in repeat]
    blocks = [block for block in blocks if len(block) > 1]
    ratios = [math.log(block[0] / statistics.fmean(block[1:])) for block in blocks]
    if len(blocks) > 2:
        spread, freedom = statistics.stdev(ratios), len(ratios) - 1
    else:
        rests = [[math.log(value) for value in block[1:]] for block in blocks]
        freedom = sum(len(rest) - 1 for rest in rests)
        if freedom < 2:
            return None
        within = sum((len(rest) - 1) * statistics.variance(rest) for rest in rests if len(rest) > 1)
        beside = statistics.fmean(1 + 1 / len(rest) for rest in rests)
        spread = math.sqrt(within / freedom * beside)
    off = statistics.fmean(ratios)
    wide = _t(freedom) * spread / math.sqrt(len(ratios))
    if abs(math.expm1(off)) <= TRANSIENT or abs(off) <= wide:
        return None
    first = "step" if period == 1 else f"{period} steps"
    longer = "longer" if off > 0 else "shorter"
    return (
        f"not stationary: the first {first} of a block took {abs(math.expm1(off)):.1%} {longer} "
        "than the rest"
    )


def _periods(steps: Sequence[float], period: int) -> list[float]:
    return [sum(steps[at : at + period]) for at in range(0, len(steps) - period + 1, period)]


def _t(freedom: int) -> float:
    from scipy.special import stdtrit  # only here: a dry run must not pay for it

    return float(stdtrit(freedom, 1 - TRANSIENT_ALPHA / 2))
