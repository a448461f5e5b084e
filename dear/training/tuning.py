"""Measurements during training, and groups that are rebuilt from them."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dear.buckets.compressors import HalfOptions
from dear.buckets.grouping import Cost
from dear.comm.communicator import Communicator
from dear.cost.collectives import measured_costs
from dear.cost.measurement import Operation
from dear.errors import Unavailable
from dear.lazy import torch
from dear.training.hooks import Hooks, at_end_of_backward

log = logging.getLogger("dear")

LEAST_MB, MOST_MB = 1.0, 256.0
TRIALS = 10
EXPLORATION = 0.1
# Variance of a measured relative step time, about (1.5 %)^2.
NOISE = 2e-4


class Tuner:
    """Proposes thresholds in MB (2^20 bytes) and learns how long a step takes with each.

    Expected improvement with xi 0.1 on the step time relative to the first trial's, over the
    logarithm of the threshold: twice as much is as far from 2 MB as from 100 MB.

    Args:
        first_mb: what the first trial uses; moved into the bounds.
        trials: how many thresholds are tried before the best of them is taken.
    """

    def __init__(self, *, first_mb: float = 25.0, trials: int = TRIALS, seed: int = 0) -> None:
        self.trials = trials
        self.tried: list[tuple[float, float]] = []
        """Thresholds in MB with their step times in seconds."""
        self._current = min(max(first_mb, LEAST_MB), MOST_MB)
        self._seed = seed
        self._model: Any = None

    def observe(self, step_s: float) -> None:
        """The step time of the threshold proposed last (at first: the first one)."""
        log.info(
            "BO Tuning step [%d], param: %.4f, iteration time: %.4f",
            len(self.tried),
            self._current,
            step_s,
        )
        self.tried.append((self._current, step_s))
        relative = step_s / self.tried[0][1]
        self._optimizer().register(params={"x": math.log2(self._current)}, target=-relative)

    def propose(self) -> float:
        """The threshold to try next, in MB."""
        exponent = float(self._optimizer().suggest()["x"])
        self._current = min(max(2.0**exponent, LEAST_MB), MOST_MB)
        return self._current

    def best(self) -> float:
        """The threshold with the shortest step so far, in MB."""
        threshold_mb, step_s = min(self.tried, key=lambda tried: tried[1])
        log.info("BO Tuning optimal param: %.4f, optimal iteration time %.4f", threshold_mb, step_s)
        return threshold_mb

    def _optimizer(self) -> Any:
        if self._model is None:
            from bayes_opt import BayesianOptimization, acquisition

            self._model = BayesianOptimization(
                f=None,
                pbounds={"x": (math.log2(LEAST_MB), math.log2(MOST_MB))},
                acquisition_function=acquisition.ExpectedImprovement(xi=EXPLORATION),
                random_state=self._seed,
                verbose=0,
                allow_duplicate_points=True,
            )
            self._model.set_gp_params(alpha=NOISE)
        return self._model


WATCHED_STEPS = 5
# Steps whose ends delimit the durations of a trial: the first trial begins with the first step, the
# others with the step after new groups were made, which is no fair sample.
FIRST_SAMPLE, SAMPLE_EVERY = 6, 5
FIRST_DURATIONS, DURATIONS = 3, 2


def tuning_steps(trials: int) -> int:
    """The number of the step after which the best of `trials` thresholds is in use."""
    return FIRST_SAMPLE + SAMPLE_EVERY * (trials - 1) + 1


class Regrouping:
    """One rule, from the first step on.

    Args:
        options: of `dear`; see `dear.buckets.grouping.group`.
    """

    watches = False
    """Arrival times are wanted after the first step, too."""

    def __init__(self, options: Any) -> None:
        self.options = options
        """The rule for groups that are made now."""

    def after_step(self) -> bool:
        """A step has ended; true if groups must be made anew, which all ranks say together."""
        return False

    def findings(self) -> dict[str, Any]:
        """As of an engine."""
        return {}


class ByWaitTime(Regrouping):
    """One group at first; after some steps, groups by how long gradients wait there."""

    watches = True

    def __init__(self, options: Any) -> None:
        super().__init__(type(options)(fusion="nearby_layers", nearby_layers=-1))
        self._wanted = options
        self._steps = 0

    def after_step(self) -> bool:
        self._steps += 1
        if self._steps != WATCHED_STEPS:
            return False
        self.options = self._wanted
        self.watches = False
        return True


class Tuned(Regrouping):
    """Thresholds that rank 0's tuner chooses from its step times, then the best of them.

    Rank 0 tells the others at fixed steps, also if its tuner fails; a rank that dies is noticed
    there at the latest.
    """

    def __init__(self, options: Any, tuner: Tuner, communicator: Communicator) -> None:
        super().__init__(options)
        self._tuner = tuner
        self._communicator = communicator
        self._ends_s: list[float] = []
        self._steps = 0
        self._failure = ""
        self._thinking_s = 0.0
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
        began_s = self._communicator.clock()
        try:
            return call()
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            return None
        finally:
            self._thinking_s += self._communicator.clock() - began_s

    def findings(self) -> dict[str, Any]:
        tried = [{"threshold_mb": mb, "step_s": step_s} for mb, step_s in self._tuner.tried]
        done = self._steps >= self.last_step
        return {
            "tuner": {
                "tried": tried,
                "threshold_mb": self.options.threshold_mb if done else None,
                "wall_s": self._thinking_s,
            }
        }

    def _follow(self, choose: Callable[[], float]) -> bool:
        chosen = self._attempt(choose)
        threshold_mb, failure = self._communicator.broadcast_object((chosen, self._failure))
        if failure:
            raise RuntimeError(f"the tuner of rank 0 failed: {failure}")
        before = self.options
        self.options = dataclasses.replace(before, threshold_mb=threshold_mb)
        return self.options != before


def regrouping(options: Any, communicator: Communicator) -> Regrouping:
    """What `options.fusion` asks for.

    Raises:
        Unavailable: the package bayesian-optimization is missing.
    """
    if options.fusion == "wait_time":
        return ByWaitTime(options)
    if options.fusion != "tuned":
        return Regrouping(options)
    if importlib.util.find_spec("bayes_opt") is None:
        raise Unavailable("fusion=tuned needs the package bayesian-optimization; install it")
    return Tuned(options, Tuner(first_mb=options.threshold_mb), communicator)


def cost_of_gradients(
    communicator: Communicator,
    options: HalfOptions,
    like: torch.Tensor,
    **within: Any,
) -> Cost:
    """Seconds of a message by bytes of gradients like `like`, as measured on these ranks.

    Args:
        options: how gradients are compressed; payloads are all-gathered, others all-reduced.
        within: `largest` and `budget_s`, as for `measured_costs`.
    """
    operation: Operation = "all_gather" if options.gathers else "all_reduce"
    cost = measured_costs(communicator, operation, like.device, **within)
    share = options.share(like.element_size()) * (communicator.size if options.gathers else 1)
    return lambda nbytes: cost(nbytes * share)


@dataclass(frozen=True, kw_only=True)
class BackwardProfile:
    """The passes of one rank, medians; parameters by their place in the list that was watched."""

    order: list[int]
    """Parameters as their gradients arrive; those that never got one come last."""
    arrivals_s: list[float]
    """In that order, never falling: seconds from the start of the backward pass."""
    forward_s: float = 0.0
    backward_s: float = 0.0


class LayerTimes:
    """Watches passes from its construction until `stop`.

    The backward pass is taken to start where the model's forward ends: the loss counts with it.
    On CUDA the times are the device's. Nothing should communicate during a pass that is watched.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        params: Sequence[torch.nn.Parameter],
        communicator: Communicator,
    ) -> None:
        self._params = list(params)
        self._cuda = params[0].device.type == "cuda"
        self._clock = communicator.clock
        self._hooks = Hooks()
        self._index = {param: i for i, param in enumerate(self._params)}
        self._began: Any = None
        self._turned: Any = None
        self._marks: dict[int, Any] = {}
        self._in_pass = False
        self._passes: list[tuple[Any, Any, dict[int, Any], Any]] = []
        self._hooks.before_forward([model], self._before_forward)
        self._hooks.after_forward(model, self._after_forward)
        self._hooks.on_gradient(self._params, self._on_gradient)

    def stop(self) -> BackwardProfile:
        """Takes the hooks out; without a backward pass: the reverse order, all at once."""
        self._hooks.remove()
        count = len(self._params)
        if not self._passes:
            return BackwardProfile(order=list(range(count))[::-1], arrivals_s=[0.0] * count)
        if self._cuda:
            torch.cuda.synchronize(self._params[0].device)
        # The low median: of two passes the faster, since the first allocates.
        middle, between, passes = statistics.median_low, self._between, self._passes
        forward = middle(between(began, turned) for began, turned, _, _ in passes)
        backward = middle(between(turned, end) for _, turned, _, end in passes)
        arrivals = []
        for i in range(count):
            seen = [between(turned, marks[i]) for _, turned, marks, _ in passes if i in marks]
            arrivals.append(middle(seen) if seen else None)
        never = max([backward, *(time for time in arrivals if time is not None)])
        # Among parameters that arrive together, the last registered came first, as in the pass.
        order = sorted(range(count), key=lambda i: (arrivals[i] is None, arrivals[i] or 0.0, -i))
        return BackwardProfile(
            order=order,
            arrivals_s=[never if arrivals[i] is None else arrivals[i] for i in order],
            forward_s=forward,
            backward_s=backward,
        )

    def _before_forward(self, module: torch.nn.Module) -> None:
        self._began = self._now()
        self._in_pass = False  # one that an error ended

    def _after_forward(self, module: torch.nn.Module) -> None:
        self._turned = self._now()

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        if self._turned is None:  # a gradient of something else than this model's forward
            return
        if not self._in_pass:
            self._in_pass = True
            self._marks = {}
            at_end_of_backward(self._end)
        self._marks[self._index[param]] = self._now()

    def _end(self) -> None:
        if self._in_pass:
            self._in_pass = False
            self._passes.append((self._began, self._turned, self._marks, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3 if self._cuda else second - first
