"""When groups are made anew while training, and by which rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dear.buckets.grouping import MIB
from dear.buckets.run_order import Fusion
from dear.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dear.comm.communicator import Communicator
    from dear.training.tuning import Tuner

WATCHED_STEPS = 5
# Steps whose ends delimit the durations of a trial: the first trial begins with the first step, the
# others with the step after new groups were made, which is no fair sample.
FIRST_SAMPLE, SAMPLE_EVERY = 6, 5
FIRST_DURATIONS, DURATIONS = 3, 2


def tuning_steps(trials: int) -> int:
    """The number of the step after which the best of `trials` thresholds is in use."""
    return FIRST_SAMPLE + SAMPLE_EVERY * (trials - 1) + 1


class Regrouping:
    """One rule, from the first step on."""

    watches = False
    """Arrival times are wanted after the first step, too."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion

    def fusion(self) -> Fusion:
        """The rule for the groups that are made now."""
        return self._fusion

    def after_step(self) -> bool:
        """A step has ended; true if groups must be made anew, which all ranks say together."""
        return False


class ByWaitTime(Regrouping):
    """One group at first; after some steps, groups by how long gradients wait there."""

    watches = True

    def __init__(self, fusion: Fusion) -> None:
        super().__init__(Fusion(rule="nearby_layers", nearby=-1))
        self._wanted = fusion
        self._steps = 0

    def after_step(self) -> bool:
        self._steps += 1
        if self._steps != WATCHED_STEPS:
            return False
        self._fusion = self._wanted
        self.watches = False
        return True


class Tuned(Regrouping):
    """Thresholds that rank 0's tuner chooses from its step times, then the best of them.

    Rank 0 tells the others at fixed steps, also if its tuner fails; a rank that dies is noticed
    there at the latest.
    """

    def __init__(self, fusion: Fusion, tuner: Tuner, communicator: Communicator) -> None:
        super().__init__(fusion)
        self._tuner = tuner
        self._communicator = communicator
        self._ends_s: list[float] = []
        self._steps = 0
        self._failure = ""
        self.last_step = tuning_steps(tuner.trials)

    def after_step(self) -> bool:
        if self._steps >= self.last_step:
            return False
        self._steps += 1
        self._ends_s.append(self._communicator.clock())
        if self._steps == self.last_step:
            return self._follow(self._tuner.best)
        since = self._steps - FIRST_SAMPLE
        if since < 0 or since % SAMPLE_EVERY:
            return False
        count = DURATIONS if since else FIRST_DURATIONS
        mean_s = (self._ends_s[-1] - self._ends_s[-1 - count]) / count
        self._attempt(lambda: self._tuner.observe(mean_s))
        if self._steps == self.last_step - 1:
            return False
        return self._follow(self._tuner.propose)

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """Calls on rank 0; a failure is kept for `_follow`, since the others wait there."""
        if self._communicator.rank or self._failure:
            return None
        try:
            return call()
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            return None

    def _follow(self, choose: Callable[[], float]) -> bool:
        chosen = self._attempt(choose)
        threshold_mb, failure = self._communicator.broadcast_object((chosen, self._failure))
        if failure:
            raise RuntimeError(f"the tuner of rank 0 failed: {failure}")
        before = self._fusion
        self._fusion = Fusion(
            rule="threshold", threshold=threshold_mb * MIB, first=self._fusion.first
        )
        return self._fusion != before


def tuned(fusion: Fusion, communicator: Communicator) -> Tuned:
    """Tuning that starts with the threshold of `fusion`.

    Raises:
        Unavailable: the package bayesian-optimization is missing.
    """
    import importlib.util

    from dear.training.tuning import Tuner

    if importlib.util.find_spec("bayes_opt") is None:
        raise Unavailable("fusion=tuned needs the package bayesian-optimization; install it")
    return Tuned(fusion, Tuner(first_mb=fusion.threshold / MIB), communicator)
