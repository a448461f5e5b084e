"""Notes on a trial: load on its machine (strain), unsteady step times, and doubtful costs.

`common.results.validity` decides from the kind of a note whether the result is valid.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from common.emulation.dilation import FELL_BEHIND, FOREIGN_CORES, UNFAITHFUL_WAIT
from common.results.records.trust import CostCheck, Note, Strain
from dear.comm.backends import missing_comm_core

LATE = 0.02
"""Largest share of the time by which real compute on an emulated cluster may take longer for lack
of cores."""
SHORT_OF_CORES = 0.02
"""Largest share of the time for which the training thread of a real rank may wait for a core."""
STEAL_CORES = 0.05
THROTTLED_S = 0.01
"""Smallest use of cores by other virtual machines, and smallest throttled time, that are noted."""
TRANSIENT = 0.03
"""Largest relative difference between the first period of a block and the others."""
TRANSIENT_ALPHA = 0.05 / 20
"""Significance level of the note for one row: of 20 tables with 20 rows, one has such a note by
chance (Bonferroni)."""
COST_MISFIT, COST_NOISE, COST_DRIFT = 0.05, 0.15, 0.1
"""Limits above which costs of collectives are doubtful: relative error of the fit beyond sampling
error, relative sampling error, and relative change during the trial. Larger values mean that
another program used the network or the machine, or that the costs do not have the form of the
fit."""


def no_comm_core(backend: str) -> Note | None:
    """Returns a note if a trial runs over Gloo because the comm core cannot be used here."""
    reason = missing_comm_core() if backend == "gloo" else None
    return reason and Note(kind="no comm core", text=f"over gloo: {reason}")


def ordinary_priority(strain: Sequence[Strain]) -> Note | None:
    """Returns a note if threads of virtual hosts did not get the priority that they need."""
    if all(launch.helpers_hurried is not False for launch in strain):
        return None
    text = "ordinary priority: this system gives no real-time priority to the threads that send"
    return Note(kind="ordinary priority", text=text)


def unfaithful(strain: Sequence[Strain]) -> bool | None:
    """Returns True if ranks of an emulated trial waited for cores in at least one launch.

    On a real cluster, they would not have waited. None: the kernel does not report waits.
    """
    if max(map(_late, strain), default=0.0) > LATE or max(map(_off, strain), default=0.0) > (
        FELL_BEHIND
    ):
        return True
    waits = [_wait(launch) for launch in strain]
    if not waits or None in waits:
        return None
    return max(waits) > UNFAITHFUL_WAIT


def _wait(strain: Strain) -> float | None:
    """Returns the waits plus the time that other virtual machines took.

    The kernel counts such stolen time as running time.
    """
    return None if strain.core_wait is None else strain.core_wait + strain.steal_cores


def _late(strain: Strain) -> float:
    return strain.late or 0.0


def _off(strain: Strain) -> float:
    return abs(strain.fell_behind)


def unfaithful_note(strain: Sequence[Strain]) -> Note:
    """Returns the note on a trial whose ranks lacked cores, about its worst launch."""
    if (late := max(map(_late, strain))) > LATE:
        return _unfaithful(f"for lack of cores, compute was longer by {late:.0%} of the time")
    worst = max(strain, key=_off)
    if _off(worst) > FELL_BEHIND:
        how = "fell behind" if worst.fell_behind > 0 else "caught up with"
        return _unfaithful(
            f"hosts {how} their devices by {_off(worst):.0%} of the time in a launch, "
            "for lack of cores"
        )
    wait = max(wait for wait in map(_wait, strain) if wait is not None)
    return _unfaithful(f"a rank's threads together waited {wait:.2f} s per second for cores")


def _unfaithful(reason: str) -> Note:
    return Note(kind="unfaithful", text=f"unfaithful: {reason}")


def oversubscribed(strain: Sequence[Strain], crowded: str | None) -> Note | None:
    """Returns a note if real ranks had fewer cores than busy threads.

    The result stays valid for this machine. Only training threads count, because many other threads
    may wait without a delay of the training.

    Args:
        crowded: text with ranks and threads, if the trial has more threads than there are cores.
    """
    waits = [launch.main_wait for launch in strain if launch.main_wait is not None]
    reasons = [crowded] if crowded else []
    if max(waits, default=0.0) > SHORT_OF_CORES:
        reasons.append(f"a rank's training thread waited {max(waits):.0%} of the time for a core")
    if not reasons:
        return None
    return Note(kind="oversubscribed", text=f"oversubscribed: {'; '.join(reasons)}")


def costs(check: CostCheck, what: str = "costs of collectives") -> Note | None:
    """Returns a note if the costs are doubtful (above `COST_MISFIT` or the next two limits)."""
    noise = check.noise
    if check.misfit > COST_MISFIT:
        reason = f"their fit is off by {check.misfit:.0%}, in addition to {noise:.0%} of noise"
    elif noise > COST_NOISE:
        reason = f"repeats of the same message differ by {noise:.0%}"
    elif abs(check.drift) > COST_DRIFT:
        reason = f"they changed by {check.drift:+.0%} during the trial"
    else:
        return None
    return Note(kind="costs", text=f"{what} are doubtful: {reason}")


def others(strain: Strain) -> str | None:
    """Describes what else used the machine's cores during a launch; None if nothing did."""
    if strain.throttled_s > THROTTLED_S:
        return f"a limit of the control group stopped ranks for {strain.throttled_s:.2g} s"
    if strain.foreign_cores > FOREIGN_CORES:
        return f"other processes used {strain.foreign_cores:.1f} cores meanwhile"
    if strain.steal_cores > STEAL_CORES:
        return f"other virtual machines took {strain.steal_cores:.2f} cores meanwhile"
    return None


def disturbed(strain: Strain, emulated: bool) -> Note | None:
    """Returns a note if others used cores for which the launch's threads waited; else None.

    If the kernel does not report waits, the threads are assumed to have waited.
    """
    who = others(strain)
    if who is None:
        return None
    if strain.throttled_s <= THROTTLED_S:
        if emulated and unfaithful([strain]) is False:
            return None
        trained = strain.main_wait
        if not emulated and trained is not None and trained + strain.steal_cores <= SHORT_OF_CORES:
            return None
    return Note(kind="disturbed", text=f"disturbed: {who}")


def beside(strain: Sequence[Strain]) -> Note | None:
    """Returns a note on load by other programs that did not keep cores from the ranks."""
    who = next(filter(None, map(others, strain)), None)
    return who and Note(kind="beside", text=f"beside others: {who}")


def invalid(strain: Strain, emulated: bool) -> Note | None:
    """Returns the note that makes a launch invalid; None for a valid launch.

    Only waits of the ranks' threads for cores make a launch invalid, not load by itself.
    """
    if (reason := disturbed(strain, emulated)) is not None:
        return reason
    return unfaithful_note([strain]) if emulated and unfaithful([strain]) else None


def not_stationary(iters: Sequence[Sequence[Sequence[float]]], period: int) -> Note | None:
    """Returns a note if the first period of blocks is longer or shorter than the other periods.

    The difference must be larger than the noise explains. With three blocks or more, the noise is
    the spread between blocks; otherwise it is the spread of the periods within a block.

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
    text = (
        f"not stationary: the first {first} of a block took {abs(math.expm1(off)):.1%} {longer} "
        "than the rest"
    )
    return Note(kind="not stationary", text=text)


def _periods(steps: Sequence[float], period: int) -> list[float]:
    return [sum(steps[at : at + period]) for at in range(0, len(steps) - period + 1, period)]


def _t(freedom: int) -> float:
    from scipy.special import stdtrit  # only here: slow, and not for dry runs

    return float(stdtrit(freedom, 1 - TRANSIENT_ALPHA / 2))
