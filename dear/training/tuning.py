"""Measurements during training, and rules that use them to change the groups of gradients."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from dear.buckets.compressors import CompressedOptions, HalfOptions
from dear.buckets.grouping import Groups
from dear.comm.communicator import Communicator
from dear.cost.collectives import SIZES, measured_costs
from dear.cost.fit import OnWire
from dear.cost.measurement import Operation
from dear.errors import Unavailable, UserError
from dear.lazy import torch
from dear.options import only_with, option_of, positive
from dear.training.hooks import Hooks, ReaderMap, at_end_of_backward

if TYPE_CHECKING:
    from bayes_opt import BayesianOptimization

    Mark = float | torch.cuda.Event
    """Seconds of the communicator's clock, or an event of the device."""

T = TypeVar("T")
log = logging.getLogger("dear")

RAMPS = ("threshold", "tuned")
"""Values of `fusion` with groups that grow from both ends of the model inwards."""


@dataclass(frozen=True, kw_only=True)
class FusionOptions(CompressedOptions):
    """Options of the fusion rule, by which layers form groups, and of compression."""

    fusion: Literal["threshold", "none", "nearby_layers", "wait_time", "tuned", "planned"] = (
        "threshold"
    )
    """`threshold`: neighbouring layers up to `threshold_mb`; `none`: every tensor alone;
    `nearby_layers`: that many layers per group; `wait_time`: layers whose gradients arrive within
    one `cycle_time_ms`, as measured in the first 5 steps; `tuned`: like `threshold`, with a
    threshold from the first 52 steps (Bayesian optimisation, 1 to 256 MB, 10 trials); `planned`:
    the best groups under a model of the step, whose passes and collectives are measured in the
    first 5 steps."""
    threshold_mb: float = 25.0
    """Size below which layers are joined, in MB of 2^20 bytes; first value of `tuned`."""
    first_mb: float | None = None
    """Size of the groups at both ends of the model, whose transfers nothing hides, in MB of 2^20
    bytes; groups grow inwards. null: the size whose bytes take as long as the start-up of a
    message, by measured costs. At `threshold_mb` and above, all groups have that size."""
    nearby_layers: int = 4
    """Layers per group with fusion=nearby_layers; negative: one group."""
    cycle_time_ms: float = 5.0
    """Length of a cycle with fusion=wait_time, in milliseconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threshold_mb", "first_mb", "cycle_time_ms"):
            positive(option_of(self, name), getattr(self, name))
        if self.nearby_layers == 0:
            raise UserError(f"{option_of(self, 'nearby_layers')} must not be 0")
        for name in ("threshold_mb", "first_mb"):
            only_with(self, name, "fusion", RAMPS)
        only_with(self, "nearby_layers", "fusion", ["nearby_layers"])
        only_with(self, "cycle_time_ms", "fusion", ["wait_time"])

    def settling_steps(self) -> int:
        regroups = dict.fromkeys(("wait_time", "planned"), WATCHED_STEPS)
        regroups["tuned"] = tuning_steps(TRIALS)
        return max(super().settling_steps(), regroups.get(self.fusion, 0))

    def slowed(self: FusionT, factor: float) -> FusionT:
        # Other rules do not use the time, and reject it when options change (tuned).
        return super().slowed(factor) if self.fusion == "wait_time" else self


FusionT = TypeVar("FusionT", bound=FusionOptions)

LEAST_MB, MOST_MB = 1.0, 256.0
THRESHOLD: dict[str, tuple[float, float]] = {"threshold_mb": (LEAST_MB, MOST_MB)}
TRIALS = 10
EXPLORATION = 0.1
NOISE = 2e-4
"""Variance of the measured relative step time, about (1.5 %)^2."""


class Tuner:
    """Proposes sizes in MB (2^20 bytes), and learns how long a step takes with each.

    Bayesian optimization maximizes the expected improvement (xi 0.1) of the step time relative to
    the first trial. It uses logarithms of sizes: 2 to 4 MB is as far as 100 to 200 MB.

    Args:
        first: sizes of the first trial, by option; clipped to the bounds.
        bounds: smallest and largest size of each option, in MB.
        trials: number of trials, after which the best sizes are used.
    """

    def __init__(
        self,
        first: Mapping[str, float],
        bounds: Mapping[str, tuple[float, float]] = THRESHOLD,
        *,
        trials: int = TRIALS,
        seed: int = 0,
    ) -> None:
        self.trials = trials
        self.tried: list[tuple[dict[str, float], float]] = []
        """Sizes in MB and step time in seconds of each trial."""
        self.bounds = bounds
        self._current = self._within(first)
        self._seed = seed
        self._model: BayesianOptimization | None = None

    def observe(self, step_s: float) -> None:
        """Records the step time in seconds for the sizes that were proposed last (or `first`)."""
        log.info(
            "BO Tuning step [%d], param: %s, iteration time: %.4f",
            len(self.tried),
            _words(self._current),
            step_s,
        )
        self.tried.append((self._current, step_s))
        relative = step_s / self.tried[0][1]
        params = {name: math.log2(size) for name, size in self._current.items()}
        self._optimizer().register(params=params, target=-relative)

    def propose(self) -> dict[str, float]:
        """Returns the sizes to try next, in MB."""
        suggested = self._optimizer().suggest()
        self._current = self._within({name: 2.0 ** float(x) for name, x in suggested.items()})
        return self._current

    def best(self) -> dict[str, float]:
        """Returns the sizes with the shortest step so far, in MB."""
        sizes, step_s = min(self.tried, key=lambda tried: tried[1])
        log.info("BO Tuning optimal param: %s, optimal iteration time %.4f", _words(sizes), step_s)
        return sizes

    def _within(self, sizes: Mapping[str, float]) -> dict[str, float]:
        return {
            name: min(max(sizes[name], least), most) for name, (least, most) in self.bounds.items()
        }

    def _optimizer(self) -> BayesianOptimization:
        if self._model is None:
            from bayes_opt import BayesianOptimization, acquisition

            self._model = BayesianOptimization(
                f=None,
                pbounds={
                    name: (math.log2(least), math.log2(most))
                    for name, (least, most) in self.bounds.items()
                },
                acquisition_function=acquisition.ExpectedImprovement(xi=EXPLORATION),
                random_state=self._seed,
                verbose=0,
                allow_duplicate_points=True,
            )
            self._model.set_gp_params(alpha=NOISE)
        return self._model


def _words(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{size:.4f}" for size in sizes.values())


WATCHED_STEPS = 5
# Steps at which a trial's time is taken. The first trial begins with the first step. Each other
# trial begins one step after new groups were made, since that step is not typical.
FIRST_SAMPLE, SAMPLE_EVERY = 6, 5
FIRST_DURATIONS, DURATIONS = 3, 2


def tuning_steps(trials: int) -> int:
    """Returns the number of the step after which the best of `trials` is in use."""
    return FIRST_SAMPLE + SAMPLE_EVERY * (trials - 1) + 1


RuleT = TypeVar("RuleT", bound=HalfOptions)


class Regrouping(Generic[RuleT]):
    """Rule of groups that never changes; base of the rules that change."""

    watches = False
    """True if arrival times are needed after the first step, too."""

    plan: Groups | None = None
    """Groups of indices of parameters, in place of a rule over layers."""

    def __init__(self, options: RuleT) -> None:
        self.options = options
        """Current options, for `dear.buckets.grouping.group`."""

    def after_step(self) -> bool:
        """Ends a step; returns True, on all ranks, if groups must be made again."""
        return False

    def findings(self) -> dict[str, object]:
        """Returns this rule's entries for `Engine.findings`."""
        return {}

    def close(self) -> None:
        """Removes the rule's hooks, if it has some."""


class ByWaitTime(Regrouping[FusionOptions]):
    """Rule with a single group at first, and then groups by the measured waits of gradients."""

    watches = True

    def __init__(self, options: FusionOptions) -> None:
        super().__init__(FusionOptions(fusion="nearby_layers", nearby_layers=-1))
        self._wanted = options
        self._steps = 0

    def after_step(self) -> bool:
        self._steps += 1
        if self._steps != WATCHED_STEPS:
            return False
        self.options = self._wanted
        self.watches = False
        return True


class Planned(ByWaitTime):
    """Rule with a single group at first, and then groups by the measured times of the passes.

    Args:
        times: measures the passes.
        plan: returns the groups for the measured passes, and findings; a collective call.
    """

    def __init__(
        self,
        options: FusionOptions,
        times: LayerTimes,
        plan: Callable[[BackwardProfile], tuple[Groups, dict[str, object]]],
    ) -> None:
        super().__init__(options)
        self._times = times
        self._plan = plan
        self._findings: dict[str, object] = {}

    def after_step(self) -> bool:
        regroups = super().after_step()
        if regroups:
            self.plan, self._findings = self._plan(self._times.stop())
        return regroups

    def findings(self) -> dict[str, object]:
        return {"planned": self._findings} if self._findings else {}

    def close(self) -> None:
        self._times.stop()


class Tuned(Regrouping[RuleT]):
    """Rule with sizes that rank 0's tuner tries one after another, and then the best of them.

    All ranks take part in rank 0's broadcasts at fixed steps, even if the tuner fails.
    """

    def __init__(self, options: RuleT, tuner: Tuner, communicator: Communicator) -> None:
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

    def _attempt(self, call: Callable[[], T]) -> T | None:
        """Runs `call` on rank 0 only; keeps an error for `_follow`, where the other ranks wait."""
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

    def findings(self) -> dict[str, object]:
        tried = [{**sizes, "step_s": step_s} for sizes, step_s in self._tuner.tried]
        done = self._steps >= self.last_step
        chosen = {
            name: getattr(self.options, name) if done else None for name in self._tuner.bounds
        }
        return {"tuner": {"tried": tried, **chosen, "wall_s": self._thinking_s}}

    def _follow(self, choose: Callable[[], dict[str, float]]) -> bool:
        chosen = self._attempt(choose)
        sizes, failure = self._communicator.broadcast_object((chosen, self._failure))
        if failure:
            raise RuntimeError(f"the tuner of rank 0 failed: {failure}")
        assert sizes is not None, "rank 0 has chosen or failed"
        before = self.options
        changes: dict[str, Any] = dict(sizes)
        self.options = dataclasses.replace(before, **changes)
        return self.options != before


def regrouping(options: FusionOptions, communicator: Communicator) -> Regrouping[FusionOptions]:
    """Returns the rule that `options.fusion` names.

    Raises:
        Unavailable: the package bayesian-optimization is missing.
    """
    if options.fusion == "wait_time":
        return ByWaitTime(options)
    if options.fusion != "tuned":
        return Regrouping(options)
    need_tuner("fusion=tuned")
    return Tuned(options, Tuner({"threshold_mb": options.threshold_mb}), communicator)


def need_tuner(option: str) -> None:
    """Raises `Unavailable` if the tuner's package is missing; `option` names what needs it."""
    if importlib.util.find_spec("bayes_opt") is None:
        raise Unavailable(f"{option} needs the package bayesian-optimization; install it")


def cost_of_gradients(
    communicator: Communicator,
    options: HalfOptions,
    like: torch.Tensor,
    *,
    operation: Operation | None = None,
    largest: int = SIZES[-1],
    queues: bool = False,
) -> OnWire:
    """Returns a function from the bytes of gradients like `like` to the seconds of their message.

    Args:
        options: compression; payloads are all-gathered, other gradients all-reduced.
        operation: another collective of the gradients.
        largest, queues: as for `measured_costs`.
    """
    operation = operation or ("all_gather" if options.gathers else "all_reduce")
    cost = measured_costs(communicator, operation, like.device, largest, queues)
    share = options.share(like.element_size()) * (communicator.size if options.gathers else 1)
    return OnWire(cost=cost, share=share)


@dataclass(frozen=True, kw_only=True)
class BackwardProfile:
    """Median times of one rank's passes; parameters are indices into `LayerTimes`' `params`."""

    order: list[int]
    """Parameters in the order of their gradients; those without a gradient come last."""
    arrivals_s: list[float]
    """Seconds from the start of the backward pass, ascending, in the order of `order`."""
    entered_s: Mapping[torch.nn.Module, float] = field(default_factory=dict)
    """Seconds from the start of the forward pass until each module ran, if modules were timed."""
    forward_s: float = 0.0
    backward_s: float = 0.0


class LayerTimes:
    """Measures forward and backward passes from the constructor until `stop`.

    The backward pass starts when the model's forward pass ends, so it includes the loss. On CUDA
    the times are the device's. Nothing should communicate meanwhile.

    Args:
        readers: if given, also the modules are timed, except those inside a compiled region.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        params: Sequence[torch.nn.Parameter],
        communicator: Communicator,
        readers: ReaderMap | None = None,
    ) -> None:
        self._params = list(params)
        self._device = params[0].device
        self._cuda = self._device.type == "cuda"
        self._clock = communicator.clock
        self._hooks = Hooks()
        self._index = {param: i for i, param in enumerate(self._params)}
        self._began: Mark | None = None
        self._turned: Mark | None = None
        self._marks: dict[int, Mark] = {}
        self._in_pass = False
        self._passes: list[tuple[Mark, Mark, dict[int, Mark], Mark]] = []
        self._entered: dict[torch.nn.Module, Mark] = {}
        self._entries: list[dict[torch.nn.Module, Mark]] = []
        """First entries into modules in each of `_passes`."""
        if readers is not None:
            inner = [module for module in model.modules() if module is not model]
            self._hooks.before_forward(inner, self._before_module, readers)
        self._hooks.before_forward([model], self._before_forward)
        self._hooks.after_forward(model, self._after_forward, raised=True)
        self._hooks.on_gradient(self._params, self._on_gradient)

    def stop(self) -> BackwardProfile:
        """Removes the hooks and returns the times.

        Without a backward pass, all gradients count as arriving at once, in reverse order.
        """
        self._hooks.remove()
        count = len(self._params)
        if not self._passes:
            return BackwardProfile(order=list(range(count))[::-1], arrivals_s=[0.0] * count)
        if self._cuda:
            torch.cuda.synchronize(self._device)
        # The low median of two passes is the faster one; the first pass allocates memory.
        middle, between, passes = statistics.median_low, self._between, self._passes
        forward = middle(between(began, turned) for began, turned, _, _ in passes)
        backward = middle(between(turned, end) for _, turned, _, end in passes)
        arrivals: dict[int, float] = {}
        for i in range(count):
            seen = [between(turned, marks[i]) for _, turned, marks, _ in passes if i in marks]
            if seen:
                arrivals[i] = middle(seen)
        last = max([backward, *arrivals.values()])
        entered: dict[torch.nn.Module, list[float]] = {}
        for (began, *_), entries in zip(passes, self._entries, strict=True):
            for module, mark in entries.items():
                entered.setdefault(module, []).append(between(began, mark))
        # Among parameters that arrive together, the last registered came first, as in the pass.
        order = sorted(range(count), key=lambda i: (i not in arrivals, arrivals.get(i, 0.0), -i))
        return BackwardProfile(
            order=order,
            arrivals_s=[arrivals.get(i, last) for i in order],
            entered_s={module: middle(times_s) for module, times_s in entered.items()},
            forward_s=forward,
            backward_s=backward,
        )

    def _before_forward(self, module: torch.nn.Module) -> None:
        self._began = self._now()
        self._entered = {}
        self._in_pass = False  # an error may have ended the last pass

    def _before_module(self, module: torch.nn.Module) -> None:
        if module not in self._entered:  # a checkpoint runs it again in the backward pass
            self._entered[module] = self._now()

    def _after_forward(self, module: torch.nn.Module) -> None:
        self._turned = self._now()

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        if self._turned is None:  # the gradient does not come from this model's forward pass
            return
        if not self._in_pass:
            self._in_pass = True
            self._marks = {}
            at_end_of_backward(self._end)
        self._marks[self._index[param]] = self._now()

    def _end(self) -> None:
        if self._in_pass:
            self._in_pass = False
            assert self._began is not None and self._turned is not None, "the forward came first"
            self._passes.append((self._began, self._turned, self._marks, self._now()))
            self._entries.append(self._entered)

    def _now(self) -> Mark:
        if not self._cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, first: Mark, second: Mark) -> float:
        if isinstance(first, torch.cuda.Event):
            assert isinstance(second, torch.cuda.Event)
            return float(first.elapsed_time(second)) / 1e3
        assert not isinstance(second, torch.cuda.Event)
        return second - first
