"""Delayed all-reduce: an update applies older gradients and waits for no transfer of its step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dear.algorithms.delayed._laps import Arrivals, DenseMessage, Lap, UpdateTimes
from dear.buckets.carriers import gather_entries
from dear.buckets.flat import Bucket, with_gradients
from dear.buckets.grouping import MIB
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError
from dear.lazy import torch
from dear.options import Options as AlgorithmOptions
from dear.options import at_least, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import (
    GradScaling,
    Replica,
    Update,
    held,
    refuse_lbfgs,
    scaled,
    step_after_closure,
)
from dear.training.gradients import GradientEngine

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

    from dear.algorithms.delayed._laps import Gradients, Groups

PENDING = "delayed_gradients"
"""Key in an optimizer's state dict for the gradients that no update has applied yet."""
HELD = "delayed_steps"
"""Key in the first parameter group: the number of steps whose gradients are in `PENDING`. A plain
optimizer that loads the state loses those gradients, and keeps this number."""


class Dadt(Algorithm["Dadt.Options"]):
    """DADT, delayed data-parallel training, as Pipe-SGD (Li et al., NeurIPS 2018, 1811.03619).

    Update: w(t+1) = w(t) - lr * mean over ranks of g(t - delay). The all-reduce may therefore take
    all of the `delay` steps in between. The first `delay` steps update nothing; `flush()` and
    `close()` apply the gradients that are held back, with one update per step.
    Invariant: after `step()` the parameters are final, and the same on all ranks. Between
    `backward()` and `step()`, `p.grad` is this rank's own gradient, and the algorithm leaves it so.
    Bytes move: each group from when it is complete, in the backward pass, to `delay` steps later.
    Cost per step and rank: one all-reduce per group, with a mark per parameter (has a gradient or
    not). If gradients are sparse: one all-gather of the entries of each, and one small all-gather
    for which the end of the backward pass waits. One copy of the gradients into one of `delay` + 1
    sets of buffers.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(AlgorithmOptions):
        """Age of the gradients, and rules by which gradients share a message."""

        delay: int = 1
        """Number of steps from the pass that computes gradients to the update that applies them, at
        least 1 (Pipe-SGD's width minus one)."""
        buffer_mb: float = 64.0
        """Largest buffer, in MB of 2^20 bytes, of gradients that are ready one after another and
        share a message; 0: every gradient has its own message."""
        cycle_time_ms: float | None = None
        """Length of a cycle in milliseconds: gradients share a buffer only if they were ready in
        the same cycle of the first pass. null: no such condition."""
        average: bool = True
        """True: gradients are averaged over ranks; False: they are summed."""
        timeline: str | None = None
        """File that `close()` writes, with `-rankR` before its suffix: the times at which groups
        were copied, sent and applied, for chrome://tracing or Perfetto. null: no file."""

        def __post_init__(self) -> None:
            at_least("dadt option 'delay'", self.delay, 1)
            at_least("dadt option 'buffer_mb'", self.buffer_mb, 0)
            positive("dadt option 'cycle_time_ms'", self.cycle_time_ms)
            if self.timeline is not None:
                path = Path(self.timeline)
                if not path.name or path.is_dir():
                    raise UserError(
                        f"dadt option 'timeline': must be the name of a file, got {self.timeline!r}"
                    )

        def settling_steps(self) -> int:
            return self.delay

        def staleness(self) -> int:
            return self.delay

    capabilities = Capabilities(consistency="delayed")
    bound = "delayed"
    candidates = ({"buffer_mb": 16.0},)
    unfused: ClassVar[Mapping[str, object]] = {"buffer_mb": 0.0}

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        sent = Transfer(
            kind="average", starts="gradient", awaited="step", steps_later=options.delay
        )
        return Overlap(transfers=(sent,))

    def refuse(self, replica: Replica[Options]) -> None:
        refuse_lbfgs(replica.optimizer, "dadt")
        if lost := replica.optimizer.param_groups[0].pop(HELD, 0):
            raise UserError(
                "the optimizer was not wrapped yet when it loaded its state, and has lost the "
                f"gradients of {lost} steps that no update has applied: wrap it before it loads "
                "the state, or flush() before the state is saved"
            )

    def alone(self, options: Options) -> bool:
        return True  # updates are delayed with one rank, too

    def engine(self, replica: Replica[Options]) -> DelayedEngine:
        return DelayedEngine(replica)


class DelayedEngine(GradientEngine[Dadt.Options]):
    """Engine whose step t applies the averaged gradients of step t - delay, if there was one.

    The first pass records the order of the gradients and sends them at its end. In later passes
    each group is copied and sent when it is complete. `step()` waits only for the transfers of the
    step that is `delay` steps earlier.
    """

    def __init__(self, replica: Replica[Dadt.Options]) -> None:
        super().__init__(replica, [[param] for param in replica.params], sparse=True)
        self._scaling = GradScaling(self.optimizer)
        self._timeline: UpdateTimes | None = None
        if self.options.timeline is not None:
            self._timeline = UpdateTimes(self.options.timeline, self.communicator)
        self._step = 0
        cycle_ms = self.options.cycle_time_ms
        self._arrivals = Arrivals(
            replica,
            buffer_bytes=self.options.buffer_mb * MIB,
            cycle_s=None if cycle_ms is None else cycle_ms / 1e3,
        )
        self._groups: Groups | None = None
        """None until the first pass."""
        self._filling: Lap | None = None
        self._held: deque[Lap] = deque()
        """Laps whose update is still to come, oldest first."""
        self._free: list[Lap] = []
        self._presented = False
        """True while `p.grad` holds the gradients that the next update applies."""
        self._watched = Bucket(self.params)

    def step(self, update: Update) -> object:
        if self._presented:
            return self._step_presented(update)
        self._scaling.refuse()
        self.schedule.refuse_unaveraged()
        self.schedule.run_if_missing()
        self.schedule.restart()
        self._watched.refuse_changed()
        self._hold(None)
        return self._apply(update) if self._due else None

    step_closure = step_after_closure

    def synchronize(self) -> None:
        super().synchronize()
        if not self.schedule.passed:
            self._wait()
        elif not self._presented:
            self._present()

    def flush(self, update: Update) -> None:
        self._presented = False
        while self._held:
            self._apply(update)

    def drop(self) -> None:
        self._presented = False

    def state_dict(self, plain: Callable[[], StateDict]) -> StateDict:
        pending = []
        for lap in self._held:
            means = lap.gradients()
            gradients = [_copied(means.get(param)) for param in held(self.optimizer)]
            pending.append({"gradients": gradients, "scale": _copied(lap.scale)})
        state = {**plain(), PENDING: pending}
        if pending:
            state["param_groups"][0][HELD] = len(pending)
        return state

    def resume(self, state: StateDict) -> None:
        self.optimizer.param_groups[0].pop(HELD, None)
        entries = state.get(PENDING, [])
        if len(entries) > self.options.delay:
            raise UserError(
                f"the state has delayed gradients of {len(entries)} steps, more than delay="
                f"{self.options.delay}: flush() before saving, or use the same delay"
            )
        self._drop_held()
        for entry in entries:
            pairs = zip(held(self.optimizer), entry["gradients"], strict=True)
            loaded = {param: _copied(value, like=param) for param, value in pairs}
            # The script may have taken parameters out of all groups.
            managed = {param: loaded.get(param) for param in self.params}
            self._held.append(Lap(step=self._step, scale=_copied(entry["scale"]), loaded=managed))

    def write_timeline(self) -> None:
        """Writes the timeline of all updates so far, if the options name a file."""
        if self._timeline is not None:
            self._timeline.write(self.params[0].device)

    def close(self) -> None:
        self._wait()
        self._drop_held()
        self.write_timeline()
        self._scaling.close()
        self.hooks.remove()

    # Backward pass.

    def arrived(self, param: torch.nn.Parameter) -> None:
        if self._presented:
            raise UserError(
                "backward() after synchronize(): p.grad holds gradients of an earlier step; call "
                "step() or zero_grad() first"
            )
        if self._groups is None:
            self._arrivals.note(param)

    def ready(self, unit: int) -> None:
        """Copies the gradients of a message, and sends it if it is dense.

        Replaces what an earlier pass of the same step has sent.
        """
        if self._groups is None:
            return
        if self._filling is None:
            self._filling = (
                self._free.pop() if self._free else Lap.of(self._groups, self.communicator)
            )
        message, clock = self._filling.messages[unit], self.communicator.clock
        if message.work is not None:
            message.work.wait()
        began = clock()
        message.pack(1 if not self.options.average else self.communicator.size)
        message.packed_s = began, clock()
        if isinstance(message, DenseMessage):
            message.send(self.communicator)

    def passed(self) -> None:
        if self._groups is None:
            self._groups = self._arrivals.groups()
            if self._groups is not None:
                dense, sparse = self._groups
                units = [*dense, *([param] for param in sparse)]
                self.schedule.regroup(units, range(len(units)))
                for unit in range(len(units)):
                    self.ready(unit)
        messages = self._filling.sparse if self._filling is not None else []
        if messages:
            # One all-gather for all sizes, on a channel without large transfers.
            gradients = [message.mine for message in messages]
            device = messages[0].params[0].device
            counts = gather_entries(gradients, device, self.communicator, channel=1)
            for message, entries in zip(messages, counts, strict=True):
                message.send(entries, self.communicator)
        self._watched.note()

    # Step.

    @property
    def _due(self) -> bool:
        """True if the oldest gradients are to be applied now."""
        return len(self._held) > self.options.delay

    def _hold(self, scale: torch.Tensor | None) -> None:
        """Adds this step's gradients, which are still in transfer, to those that are held back."""
        self._watched.forget()
        self._step += 1
        lap, self._filling = self._filling, None
        if lap is None:  # no rank had a gradient
            lap = Lap(loaded=dict.fromkeys(self.params))
        lap.step, lap.scale = self._step, scale
        self._held.append(lap)

    def _apply(self, update: Update) -> object:
        """Runs `update` with the oldest gradients that are held back."""
        lap = self._held.popleft()
        gradients = lap.due()
        began = self.communicator.clock()
        try:
            if lap.scale is not None and not _unscale(gradients, lap.scale):
                return None
            return with_gradients(gradients, update)
        finally:
            self._release(lap, began)

    def _present(self) -> None:
        """Sets each `p.grad` to the gradient that the next update applies."""
        if self._watched.scaled_in_place():
            self._scaling.refuse_early_unscaling()
        self._watched.refuse_changed()
        self._watched.forget()
        if len(self._held) == self.options.delay:
            for param, gradient in self._held[0].due().items():
                param.grad = _copied(gradient)
        else:
            for param in self.params:
                if param.grad is not None:
                    param.grad = torch.zeros_like(param.grad)
        self._presented = True

    def _step_presented(self, update: Update) -> object:
        calling, attributes = scaled(self.optimizer), vars(self.optimizer)
        if calling and attributes["grad_scale"] is None:
            raise UserError(
                "scaler.unscale_(optimizer) divides by the present scale, but these gradients "
                "belong to an earlier step: leave unscaling to scaler.step(optimizer)"
            )
        self._presented = False
        self.schedule.restart()
        self._hold(attributes["grad_scale"].clone() if calling else None)
        if not self._due:
            return None
        lap = self._held.popleft()
        began = self.communicator.clock()
        try:
            if calling:
                attributes["grad_scale"] = lap.scale
            elif lap.scale is not None and not _unscale(
                {param: param.grad for param in self.params}, lap.scale
            ):
                return None
            return self._scaling.step(update)
        finally:
            self._release(lap, began)

    def _release(self, lap: Lap, applied_s: float | None) -> None:
        """Makes the buffers of a lap free for reuse, and records its times for the timeline."""
        if self._timeline is not None:
            self._timeline.note(lap, applied_s)
        if lap.messages:
            lap.wait()
            self._free.append(lap)

    def _wait(self) -> None:
        for lap in self._held:
            lap.wait()
        if self._filling is not None:
            self._filling.wait()

    def _drop_held(self) -> None:
        while self._held:
            self._release(self._held.popleft(), None)


def _copied(value: torch.Tensor | None, like: torch.Tensor | None = None) -> torch.Tensor | None:
    """Returns a copy of a gradient, on the device and in the type of `like` if it is given."""
    if value is None:
        return None
    copy = value.detach().clone()
    return copy if like is None else copy.to(device=like.device, dtype=like.dtype)


def _unscale(gradients: Gradients, scale: torch.Tensor) -> bool:
    """Divides by the loss scale; returns False, the same on all ranks, if one is not finite."""
    finite = True
    for gradient in gradients.values():
        if gradient is None:
            continue
        values = gradient._values() if gradient.is_sparse else gradient
        values.div_(scale.to(values.device))
        finite = finite and bool(values.isfinite().all())
    return finite
