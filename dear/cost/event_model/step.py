"""Event model of a training step on one of many equal ranks.

An algorithm states by its `Overlap` at which moments of a step (gradient ready, end of the backward
pass, ...) it starts and awaits the transfers of a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dear.cost.event_model.events import Events
from dear.cost.event_model.link import CHUNK_BYTES, Link, Sending
from dear.cost.event_model.passes import Message, Passes, UnmodelledError
from dear.cost.fit import Cost
from dear.cost.overlap import Cycles, Kind, Moment, Overlap, Transfer, Unstated, shared_out

OPERATIONS: dict[Kind, str] = {
    "average": "all_reduce",
    "reduce": "reduce_scatter",
    "gather": "all_gather",
}
"""Collective of each kind of transfer; a kind that is missing here is no collective."""

FUSED = "fused_all_reduce"
"""Key of the cost of an all-reduce of several tensors, with their copies to and from a buffer."""

LONGEST = 64
"""Number of steps to run if the step times do not repeat. Their second half counts then."""
PERIODS = 4
"""Largest number of periods after which the step times may repeat."""
SAME = 1e-9
"""Largest relative difference of two step times that count as equal."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Wait of the device for a message."""

    moment: Moment
    layer: int | None
    """Layer before which the device waited; None: not before a layer."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted step in the steady state, in seconds."""

    step_s: float
    exposed_s: float
    """Part of `step_s` in which the device waits for communication."""
    waits: tuple[Wait, ...]
    """Waits in the last step."""


def predict(
    passes: Passes,
    messages: Sequence[Message],
    statement: Overlap | Unstated | None,
    costs: Mapping[str, Cost],
    world_size: int,
    chunk_bytes: float = CHUNK_BYTES,
) -> Prediction:
    """Predicts the step of an algorithm on `world_size` equal ranks, each with its own link.

    Args:
        messages: messages in the order of the plan (`messages_of`) or of groups (`grouped`).
        statement: when the algorithm starts and awaits transfers (`Algorithm.overlap_of`).
        costs: the communication library's cost of each operation (`all_reduce`, ...). Without the
            key `FUSED`, copies to and from its fusion buffer cost nothing.

    Raises:
        UnmodelledError: the statement is incomplete, or a cost is missing.
    """
    if isinstance(statement, Unstated) and statement.cycles is not None:
        _check_costs(["average"], costs)
        return _steady(_InCycles(passes, messages, statement.cycles, costs))
    if not isinstance(statement, Overlap):
        raise UnmodelledError("the algorithm does not state when messages start")
    kinds = [transfer.kind for transfer in statement.transfers]
    _check_costs(kinds, costs)
    return _steady(_Stated(passes, messages, statement, costs, world_size, chunk_bytes))


def _check_costs(kinds: Sequence[Kind], costs: Mapping[str, Cost]) -> None:
    for kind in kinds:
        operation = OPERATIONS.get(kind)
        if operation is None:
            raise UnmodelledError(f"each rank uses {kind} with a few others, not a collective")
        if operation not in costs:
            raise UnmodelledError(f"no cost of {operation} is known")


State = tuple[float, ...]
"""Seconds of a step, and the age in seconds of each transfer that is under way at its end."""


def steady(step: Callable[[], State], period: int = 1) -> int:
    """Runs steps until they repeat; returns how many of the last steps have the mean time.

    Equal step times are not enough: while a queue fills, steps that wait for nothing are equal.

    Args:
        step: runs a step and returns its state.
        period: number of steps after which what a rank does repeats.
    """
    steps: list[State] = []
    while len(steps) < longest(period):
        steps.append(step())
        count = settled(steps, period)
        if count is not None:
            return count
    return second_half(len(steps), period)


def longest(period: int) -> int:
    """Returns the number of steps to run if they do not repeat."""
    return max(LONGEST, 3 * period)


def second_half(steps: int, period: int) -> int:
    """Returns the number of steps in whole periods of the second half."""
    return max(1, steps // 2 // period) * period


def settled(steps: Sequence[State], period: int) -> int | None:
    """Returns the number of last steps that repeat those before; None: not yet."""
    counts = range(period, PERIODS * period + 1, period)
    return next((count for count in counts if _repeats(steps, count)), None)


def _steady(rank: _Rank) -> Prediction:
    lengths: list[float] = []
    exposed: list[float] = []

    def step() -> State:
        began_s = rank.events.now_s
        rank.waits = []
        rank.step()
        lengths.append(rank.events.now_s - began_s)
        exposed.append(sum(wait.seconds for wait in rank.waits))
        return (lengths[-1],)

    count = steady(step)
    return _mean(lengths[-count:], exposed[-count:], rank)


def _repeats(steps: Sequence[State], period: int) -> bool:
    """Returns True if the last `period` steps equal the `period` before them.

    The very first step awaits nothing, so it does not count.
    """
    if len(steps) < 2 * period + 1:
        return False
    pairs = zip(steps[-2 * period : -period], steps[-period:], strict=True)
    return all(
        len(before) == len(after) and all(map(_close, before, after)) for before, after in pairs
    )


def _close(before: float, after: float) -> bool:
    return math.isclose(before, after, rel_tol=SAME, abs_tol=1e-12)


def _mean(lengths: Sequence[float], exposed: Sequence[float], rank: _Rank) -> Prediction:
    count = len(lengths)
    return Prediction(
        step_s=math.fsum(lengths) / count,
        exposed_s=math.fsum(exposed) / count,
        waits=tuple(rank.waits),
    )


class _Rank:
    """Device and link of one rank."""

    def __init__(self, passes: Passes, messages: Sequence[Message], chunk_bytes: float) -> None:
        self.events = Events()
        self.link = Link(self.events, chunk_bytes)
        self.passes, self.messages = passes, messages
        self.waits: list[Wait] = []

    def step(self) -> None:
        """Runs one step."""
        raise NotImplementedError

    def wait(self, sendings: Sequence[Sending], moment: Moment, layer: int | None = None) -> None:
        """Waits until all these messages have ended."""
        began_s = self.events.now_s
        self.events.run_until(lambda: all(sending.ended for sending in sendings))
        waited_s = self.events.now_s - began_s
        if waited_s:
            self.waits.append(Wait(moment=moment, layer=layer, seconds=waited_s))


class _Stated(_Rank):
    """Rank that follows the statement of its algorithm."""

    def __init__(
        self,
        passes: Passes,
        messages: Sequence[Message],
        overlap: Overlap,
        costs: Mapping[str, Cost],
        world_size: int,
        chunk_bytes: float,
    ) -> None:
        super().__init__(passes, messages, chunk_bytes)
        self._overlap, self._costs = overlap, costs
        gradients = passes.gradients
        self._layer = [min(gradients[i].layer for i in message.members) for message in messages]
        """First layer that reads each message."""
        self._ready = [max(message.members) for message in messages]
        """Last gradient of each message."""
        shared = any(t.kind == "gather" and "parameters" in t.carries for t in overlap.transfers)
        rate_s = passes.update_s / passes.nbytes / (world_size if shared else 1)
        self._update_s = [rate_s * sum(gradients[i].nbytes for i in m.members) for m in messages]
        self._by_layer = _indices(self._layer)
        self._by_ready = _indices(self._ready)
        self._by_need = sorted(range(len(messages)), key=self._layer.__getitem__)
        self._queue = {t: self._queues(t.levels) for t in overlap.transfers if t.urgent}
        """Queue of each message, by its urgent transfer; 0 is the most urgent."""
        self._ahead = _ahead(messages)
        self._transfers = [_transfers_of(message, overlap) for message in messages]
        self._step = 0
        self._under_way: dict[tuple[int, Transfer, int], list[Sending]] = {}
        """Messages in flight, by message, transfer and step of the start."""

    def step(self) -> None:
        every = range(len(self.messages))
        self._do(every, "model")
        for layer, seconds in enumerate(self.passes.forward_s):
            needed = self._by_layer.get(layer, [])
            self._do(needed, "layer", layer)
            if self._overlap.updates == "layer" and self._step:
                self.events.run_for(sum(self._update_s[i] for i in needed))
            self.events.run_for(seconds)
        self._backward()
        self._do(every, "pass")
        self._end()
        self._step += 1

    def _backward(self) -> None:
        at_s = 0.0
        for index, gradient in enumerate(self.passes.gradients):
            self._do(self._ahead.get(index, []), "ahead")
            self.events.run_for(max(0.0, gradient.ready_s - at_s))
            at_s = max(at_s, gradient.ready_s)
            complete = self._by_ready.get(index, [])
            self._do(complete, "gradient")
            if self._overlap.updates == "gradient":
                self.events.run_for(sum(self._update_s[i] for i in complete))
        self.events.run_for(max(0.0, self.passes.backward_s - at_s))

    def _end(self) -> None:
        """Runs the optimizer's `step()`: awaits and updates each message, then starts new ones."""
        every = range(len(self.messages))
        for i in every:
            self._await([i], "step", began_before=True)
            if self._overlap.updates == "step":
                self.events.run_for(self._update_s[i])
        # In the order in which the messages are needed.
        self._start(self._by_need, "step")
        self._await(every, "step")

    def _do(self, messages: Sequence[int], moment: Moment, layer: int | None = None) -> None:
        """Runs one moment: waits for earlier transfers, starts new ones, awaits some of these."""
        self._await(messages, moment, layer, began_before=True)
        self._start(messages, moment)
        self._await(messages, moment, layer)

    def _start(self, messages: Sequence[int], moment: Moment) -> None:
        for i in messages:
            for transfer in self._transfers[i]:
                if transfer.starts == moment:
                    self._under_way[i, transfer, self._step] = self._send(i, transfer)

    def _send(self, index: int, transfer: Transfer) -> list[Sending]:
        nbytes = self.messages[index].nbytes
        parts = max(1, math.ceil(nbytes / transfer.part_bytes)) if transfer.part_bytes else 1
        channel, priority = 0, 0.0
        if transfer.urgent:
            queue = self._queue[transfer][index]
            channel, priority = queue + 1, -float(queue)
        cost = self._costs[OPERATIONS[transfer.kind]]
        return [
            self.link.send(cost, nbytes / parts, channel=channel, priority=priority)
            for _ in range(parts)
        ]

    def _queues(self, levels: int | None) -> list[int]:
        if levels is None:
            return self._layer
        queues = shared_out([self.messages[i].nbytes for i in self._by_need], levels)
        return [queue for _, queue in sorted(zip(self._by_need, queues, strict=True))]

    def _await(
        self,
        messages: Sequence[int],
        moment: Moment,
        layer: int | None = None,
        *,
        began_before: bool = False,
    ) -> None:
        """Waits for the transfers that are awaited at this moment.

        Args:
            began_before: True to omit transfers that start at this moment.
        """
        for i in messages:
            for transfer in self._transfers[i]:
                if transfer.awaited != moment:
                    continue
                if began_before and transfer.starts == moment and not transfer.steps_later:
                    continue
                key = i, transfer, self._step - transfer.steps_later
                self.wait(self._under_way.pop(key, []), moment, layer)


def _indices(keys: Sequence[int]) -> dict[int, list[int]]:
    """Returns the indices of equal keys, by key."""
    indices: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, []).append(index)
    return indices


def _ahead(messages: Sequence[Message]) -> dict[int, list[int]]:
    """Returns which messages are fetched just before the backward pass computes a gradient.

    These are the messages of the next layers, by the gradient's index. The first and the second
    message are fetched at the start of the pass.
    """
    reached = sorted(range(len(messages)), key=lambda i: min(messages[i].members))
    ahead: dict[int, list[int]] = {}
    for before, i in zip([*reached[:1], *reached], reached, strict=False):
        ahead.setdefault(min(messages[before].members), []).append(i)
    return ahead


def _transfers_of(message: Message, overlap: Overlap) -> tuple[Transfer, ...]:
    instead = [t for t in overlap.transfers if t.buckets == "instead"]
    some = any(t.buckets == "some" for t in overlap.transfers)
    limits = [t.up_to_bytes for t in instead if t.up_to_bytes is not None]
    if (some and message.some is None) or len(limits) < len(instead):
        raise UnmodelledError("it is not known which messages have which transfers")
    small = tuple(t for t, limit in zip(instead, limits, strict=True) if message.nbytes <= limit)
    having = ("all", "some") if message.some else ("all",)
    return small or tuple(t for t in overlap.transfers if t.buckets in having)


class _InCycles(_Rank):
    """Rank with a separate thread that sends ready tensors in cycles, as Horovod's."""

    def __init__(
        self,
        passes: Passes,
        messages: Sequence[Message],
        cycles: Cycles,
        costs: Mapping[str, Cost],
    ) -> None:
        super().__init__(passes, messages, CHUNK_BYTES)
        self._cycles, self._cost = cycles, costs["all_reduce"]
        self._fused_cost = costs.get(FUSED, self._cost)
        self._ready: list[float] = []
        """Bytes of each tensor that has not been sent."""
        self._missing = 0
        """Number of tensors of the pass that have not arrived."""
        self._share = sum(message.nbytes for message in messages) / passes.nbytes
        self._begin()

    def step(self) -> None:
        for seconds in self.passes.forward_s:
            self.events.run_for(seconds)
        at_s = 0.0
        for gradient in self.passes.gradients:
            self.events.run_for(max(0.0, gradient.ready_s - at_s))
            at_s = max(at_s, gradient.ready_s)
            self._give(gradient.nbytes * self._share)
        self.events.run_for(max(0.0, self.passes.backward_s - at_s))
        self._give(self._cycles.marks_bytes * len(self.passes.gradients))
        began_s = self.events.now_s
        self.events.run_until(lambda: not self._missing)
        waited_s = self.events.now_s - began_s
        if waited_s:
            self.waits.append(Wait(moment="pass", layer=None, seconds=waited_s))
        self.events.run_for(self.passes.update_s)

    def _give(self, nbytes: float) -> None:
        if nbytes:
            self._ready.append(nbytes)
            self._missing += 1

    def _begin(self) -> None:
        """Starts a cycle: ranks agree on common tensors, fuse and send them, and pause."""
        began_s, ready = self.events.now_s, self._ready
        self._ready = []
        agreed_s = began_s + self._cost(self._cycles.agreement_bytes)
        self.events.at(agreed_s, lambda: self._send(began_s, ready))

    def _send(self, began_s: float, ready: list[float]) -> None:
        if not ready:
            self.events.at(began_s + self._cycles.cycle_s, self._begin)
            return
        count, total = 1, ready[0]
        while count < len(ready) and total + ready[count] <= self._cycles.fusion_bytes:
            total += ready[count]
            count += 1

        def ended() -> None:
            self._missing -= count
            self._send(began_s, ready[count:])

        cost = self._cost if count == 1 else self._fused_cost
        self.events.at(self.events.now_s + cost(total), ended)
