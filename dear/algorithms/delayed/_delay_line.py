"""The laps of a delayed engine: one being filled, and those that wait for their update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dear.algorithms.delayed._laps import Lap
from dear.buckets.ready_groups import ready_groups
from dear.buckets.run_order import RunOrder, agree
from dear.errors import UserError
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

    from dear.algorithms.delayed._held_back import Held
    from dear.comm.communicator import Communicator, Work
    from dear.training.trace import Timeline


class DelayLine:
    """Packs and sends gradients step by step; hands their averages out in the same order.

    Args:
        groups: see `Lap`, as are `sparse` and `divisor`; as many laps are made as are in use at a
            time.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Parameter]],
        sparse: Sequence[Parameter],
        communicator: Communicator,
        divisor: int,
        timeline: Timeline | None,
    ) -> None:
        self._communicator = communicator
        self._groups, self._sparse, self._divisor = groups, sparse, divisor
        self._timeline = timeline
        self._free: list[Lap] = []
        self._filling: Lap | None = None
        # Asked for their times at the end only: on a GPU the host would have to wait.
        self._sent: list[tuple[dict[str, int], Any, Work | None, float | None]] = []
        if timeline is not None:
            communicator.record_times = True
        if sparse:
            communicator.ensure_channels(2)

    def pack(self, index: int) -> None:
        """Copies and sends one message of the step that is being filled."""
        self._lap().pack(index)

    def end_pass(self) -> None:
        """Every message of the pass is packed."""
        self._lap().send_sparse()

    def take(self) -> Lap:
        """The lap that has been filled; the next `pack` fills another."""
        lap, self._filling = self._lap(), None
        return lap

    def give_back(self, held: Held, applied_s: float | None) -> None:
        """Its gradients are not needed any more."""
        lap = held.lap
        if lap is None:
            return
        lap.wait()
        if self._timeline is not None:
            for index, message in enumerate(lap.messages):
                facts = {"step": held.step, "group": index, "bytes": message.nbytes}
                self._sent.append((facts, message.packed_s, message.work, applied_s))
        self._free.append(lap)

    def draw(self) -> None:
        """Adds all that was given back to the timeline; every transfer must have ended."""
        while self._sent:
            _draw(self._timeline, *self._sent.pop())

    def wait(self) -> None:
        """Returns when the lap that is being filled has nothing under way."""
        if self._filling is not None:
            self._filling.wait()

    def _lap(self) -> Lap:
        if self._filling is None:
            self._filling = self._free.pop() if self._free else self._new_lap()
        return self._filling

    def _new_lap(self) -> Lap:
        return Lap(self._groups, self._sparse, self._communicator, self._divisor)


class Watch:
    """What the first backward pass shows: the order of arrival, and which gradients are sparse."""

    def __init__(
        self, model: Module, params: Sequence[Parameter], communicator: Communicator
    ) -> None:
        self._model, self._params, self._communicator = model, list(params), communicator
        self._arrived: dict[Parameter, float] = {}

    def arrived(self, param: Parameter) -> None:
        """Its gradient is there; what counts is the last pass before `groups`."""
        self._arrived.pop(param, None)
        self._arrived[param] = self._communicator.clock()

    def groups(
        self, buffer_bytes: float, cycle_s: float | None
    ) -> tuple[list[list[Parameter]], list[Parameter]] | None:
        """Groups of dense parameters, and the sparse ones, the same on all ranks.

        Every rank calls it, when its pass has ended. None if no rank has a gradient.

        Raises:
            UserError: a gradient is sparse on one rank and dense on another; on all ranks.
        """
        now = self._communicator.clock()
        place = {param: i for i, param in enumerate(self._params)}
        for param in self._params:
            if param.grad is not None and param not in self._arrived:
                self._arrived[param] = now  # the script has set it
        seen = [param for param in self._arrived if param.grad is not None]
        own = RunOrder(
            reads=[],
            arrivals=[place[param] for param in seen],
            waits_s=[now - self._arrived[param] for param in seen],
        )
        order = agree(own, self._communicator)
        if not order.arrivals:
            return None
        kinds = {place[param]: param.grad.layout is torch.sparse_coo for param in seen}
        sparse = self._agreed(kinds)
        dense = [param for param in self._params if param not in set(sparse)]
        return (
            ready_groups(self._params, dense, order, buffer_bytes=buffer_bytes, cycle_s=cycle_s),
            sparse,
        )

    def _agreed(self, kinds: dict[int, bool]) -> list[Parameter]:
        everybody = self._communicator.gather_objects(kinds)
        sparse: dict[int, bool] = {}
        for found in everybody:
            for index, kind in found.items():
                if sparse.setdefault(index, kind) != kind:
                    raise UserError(
                        f"the gradient of a parameter of shape {tuple(self._params[index].shape)} "
                        "is sparse on some ranks and dense on others"
                    )
        # Of an embedding that no rank has used yet.
        declared = {
            module._parameters.get("weight")
            for module in self._model.modules()
            if getattr(module, "sparse", None) is True
        }
        return [
            param
            for index, param in enumerate(self._params)
            if sparse.get(index, param in declared)
        ]


def _draw(
    timeline: Timeline,
    facts: dict[str, int],
    packed_s: tuple[float, float] | None,
    work: Work | None,
    applied_s: float | None,
) -> None:
    name = f"step {facts['step']} group {facts['group']}"
    if packed_s is not None:
        timeline.add("pack", name, *packed_s, **facts)
    if work is None:
        return
    times = work.times()
    timeline.add("in queue", name, times.enqueued_s, times.started_s, **facts)
    timeline.add("transfer", name, times.started_s, times.finished_s, **facts)
    if applied_s is not None:
        timeline.add("waits for update", name, times.finished_s, applied_s, **facts)
