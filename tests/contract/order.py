"""Holds a program to what its algorithm states of order and overlap (`dear.cost.overlap`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dear.buckets.compressors import HalfOptions
from dear.cost.overlap import Moment, Overlap, Transfer, Unstated
from dear.training.algorithm import Algorithm
from tests.contract.logged import Program
from tests.contract.network import SIZES, Event, Message, Network, Place, on

MARKS = 64
"""Bytes per message for who has a gradient, and to fill up."""
LAYERS = frozenset(range(len(SIZES)))
OPERATIONS = {
    "average": ("all_reduce", "all_gather"),
    "reduce": ("reduce_scatter", "reduce"),
    "gather": ("all_gather", "broadcast"),
    "exchange": ("exchange", "all_reduce"),
    "put": ("put",),
    "get": ("get",),
}
UNSTATED = """{name} does not state what overlaps what. Say in its class when its messages start and
what waits for them, for example

    overlap = Overlap(transfers=(Transfer(kind="average", starts="gradient", awaited="pass"),))

(dear.cost.overlap has the words; override `overlap_of(options)` where options change it), or
`overlap = Unstated("why nobody can know")`. See docs/algorithms.md, "Order and overlap"."""


def statement(algorithm: Algorithm, options: Any) -> Overlap | Unstated:
    """Returns an algorithm's statement; AssertionError says what to write if there is none."""
    stated = type(algorithm).overlap_of(options)
    if stated is None:
        raise AssertionError(UNSTATED.format(name=type(algorithm).__name__))
    if isinstance(stated, Unstated):
        assert len(stated.reason.split()) > 5, "an algorithm that states nothing says why"
    return stated


def violations(
    algorithm: Algorithm,
    options: Any,
    *,
    native: bool = True,
    every: int = 1,
) -> list[str]:
    """Returns, in words, where a program differs from what the algorithm states.

    Args:
        every: only the last of so many steps communicates.
    """
    stated = statement(algorithm, options)
    if isinstance(stated, Unstated):
        return []
    run = Run(algorithm, options, Network(native=native), every)
    broken = list(_of_messages(stated, run))
    broken += _of_layers(stated, run, every)
    broken += _of_other_waits(stated, run)
    broken += _of_updates(stated, run)
    for step in run.steps:
        broken += _of_urgency(stated, run.started(step), native)
        broken += _of_bytes(run.started(step), options)
    broken += _of_accumulation(run)
    return list(dict.fromkeys(broken))


class Run:
    """Some steps of a program after it has settled: ordinary ones, and one that accumulates.

    What somebody waits for ends then; what nothing waits for, as stated, ends with its step.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        options: Any,
        network: Network | None = None,
        every: int = 1,
    ) -> None:
        stated = statement(algorithm, options)
        transfers = stated.transfers if isinstance(stated, Overlap) else ()
        later = max((t.steps_later for t in transfers), default=0)
        free = {o for t in transfers if t.awaited is None for o in OPERATIONS[t.kind]}
        network = network or Network()

        def end_free() -> None:
            while messages := [m for m in network.under_way if m.operation in free]:
                network.end(messages[0])

        with on(network):
            trained = Program(algorithm, options, network)
            trained.train((options.settling_steps() + later + 3) // every * every, after=end_free)
            first = network.step
            trained.train(2 * every, after=end_free)
            trained.train(every, paused=True, after=end_free)
            self.steps = range(first, network.step)
            trained.train(later + 1, after=end_free)
        self.events = network.log
        self.ordinary = range(first, first + every)
        self.accumulated = range(first + 2 * every, first + 3 * every)

    def started(self, step: int) -> list[Message]:
        """The messages of a step with gradients or parameters, in their order."""
        started_here = [e.message for e in self.events if e.what == "start" and e.step == step]
        return [message for message in started_here if message is not None and message.carries]

    def groups(self) -> list[list[int]]:
        """The layers in each message of an ordinary step."""
        return [sorted(message.layers) for message in self.started(self.ordinary[-1])]


def _kind(transfers: Any, message: Message) -> Transfer | None:
    """The statement about a message; of several the one that starts there."""
    overlapping = [
        transfer
        for transfer in transfers
        if message.operation in OPERATIONS[transfer.kind]
        and message.carries == frozenset(transfer.carries)
    ]
    there = [t for t in overlapping if _is_at(message.place, t.starts, message.layers)]
    return next(iter([*there, *overlapping]), None)


def _is_at(place: Place, moment: Moment, layers: frozenset[int]) -> bool:
    """Returns whether a place is a moment, for a message with those layers."""
    if moment in ("layer", "gradient"):
        # Its layers run, the first one first, and get their gradients, the first one last.
        first = min(layers)
        return place == (moment, first) or (moment == "layer" and place[0] == "model" and not first)
    if moment == "ahead":
        after = max(layers) + 2
        return place == (("gradient", after) if after < len(SIZES) else ("backward", None))
    if moment == "pass":
        return place in (("pass", None), ("gradient", 0))
    return place[0] == moment


def _told(place: Place) -> str:
    name, layer = place
    return {
        "backward": "at the beginning of the backward pass",
        "model": "before the forward pass",
        "layer": f"before layer {layer} runs",
        "gradient": f"when the gradient of layer {layer} is there",
        "pass": "when the backward pass is over",
        "step": "in step()",
    }.get(name, "outside all moments")


def _of_messages(stated: Overlap, run: Run) -> Iterator[str]:
    waits: dict[Message, Event] = {}
    for event in run.events:
        if event.what == "wait" and event.message is not None:
            waits.setdefault(event.message, event)
    for message in (message for step in run.steps for message in run.started(step)):
        transfer = _kind(stated.transfers, message)
        if transfer is None:
            yield f"{message} is not stated"
            continue
        if not _is_at(message.place, transfer.starts, message.layers):
            yield f"{message} starts {_told(message.place)}, stated is {transfer.starts!r}"
        wait, awaited = waits.get(message), transfer.awaited
        if wait is None:
            if awaited is not None:
                yield f"{message}: nothing waits for it, stated is {awaited!r}"
        elif awaited is None:
            yield f"{message} is waited for {_told(wait.place)}, and nothing should"
        else:
            later = wait.step - message.step
            there = _is_at(wait.place, awaited, message.layers)
            if later != transfer.steps_later or not there:
                yield (
                    f"{message} is waited for {_told(wait.place)}, {later} steps later; stated is "
                    f"{awaited!r}, {transfer.steps_later} steps later"
                )


def _of_layers(stated: Overlap, run: Run, every: int) -> Iterator[str]:
    """All are sent in steps that communicate, and none in others."""
    for step in run.steps:
        carried = dict.fromkeys(stated.transfers, frozenset[int]())
        for message in run.started(step):
            transfer = _kind(stated.transfers, message)
            if transfer is not None:
                carried[transfer] |= message.layers
        instead = frozenset[int]().union(*(carried[t] for t in carried if t.buckets == "instead"))
        due = step % every == every - 1
        for transfer, layers in carried.items():
            missing = LAYERS - instead - layers
            if due and missing and transfer.buckets == "all":
                yield f"nothing is sent of layers {sorted(missing)}: {transfer.kind}"
            if not due and layers:
                yield f"{transfer.kind}: something is sent in a step that should send nothing"


def _of_other_waits(stated: Overlap, run: Run) -> Iterator[str]:
    """Meetings of all ranks, and messages that carry neither gradients nor parameters."""
    may = {t.awaited for t in stated.transfers} | set(stated.meetings)
    if "layer" in may or "model" in may:
        may |= {"layer", "model"}
    for event in run.events:
        message = event.message
        if (
            event.what != "wait"
            or event.step not in run.steps
            or message is None
            or message.carries
        ):
            continue
        meets = message.operation in ("barrier", "broadcast_object", "gather_objects")
        if event.place[0] not in (stated.meetings if meets else may):
            yield f"{message.operation} is waited for {_told(event.place)}, which is not stated"
    met = {
        e.place[0]
        for e in run.events
        if e.what == "wait" and e.message is not None and e.message.operation == "barrier"
    }
    for moment in set(stated.meetings) - met:
        yield f"ranks do not meet at {moment!r}, as stated"


def _of_updates(stated: Overlap, run: Run) -> Iterator[str]:
    updates = [e for e in run.events if e.what == "update" and e.step in run.steps and e.layers]
    for event in updates:
        if not _is_at(event.place, stated.updates, event.layers):
            of = f"layers {sorted(event.layers)}"
            yield f"{of} are updated {_told(event.place)}, stated is {stated.updates!r}"
    if not updates:
        yield "nothing is updated"


def _of_urgency(stated: Overlap, sent: list[Message], native: bool) -> Iterator[str]:
    for transfer in (t for t in stated.transfers if t.urgent):
        messages = [m for m in sent if _kind([transfer], m) is not None]
        for index, later in enumerate(messages):
            for earlier in messages[:index]:
                first, last = min(earlier.layers), min(later.layers)
                if last >= first:
                    if earlier.priority < later.priority:
                        yield f"{later} overtakes {earlier}, and is needed later"
                elif earlier.place == later.place and earlier.priority >= later.priority:
                    yield f"{earlier} starts before {later}, which is needed first"
                elif earlier.priority > later.priority:
                    yield f"{later} cannot overtake {earlier}, and is needed first"
        levels = {m.priority for m in messages}
        if native and transfer.starts == "gradient" and len(levels) < 2 < len(messages):
            yield "all messages are equally urgent: none can overtake another"


def _of_bytes(sent: list[Message], options: Any) -> Iterator[str]:
    """Gradients take the room that the compression says, and a little for marks."""
    if not isinstance(options, HalfOptions):
        return
    once = [m for m in sent if m.carries == {"gradients"} and _reduces(m)]
    # An all-gather is as long as what both ranks send.
    nbytes = sum(m.nbytes // (2 if m.operation == "all_gather" else 1) for m in once)
    wanted = options.share(4) * sum(SIZES) * 4
    if not wanted <= nbytes <= wanted + MARKS * len(once):
        yield f"gradients take {nbytes} bytes on their way, by the options {wanted:g}"


def _reduces(message: Message) -> bool:
    """Not a second half."""
    return message.place[0] in ("gradient", "pass")


def _of_accumulation(run: Run) -> Iterator[str]:
    def sent(steps: range) -> list[Any]:
        """Messages in order, with where they started; but for reads, which each pass makes."""
        return [
            (str(e.message), e.message.place, e.message.nbytes)
            for e in run.events
            if e.what == "start"
            and e.step in steps
            and e.message is not None
            and not (e.message.operation == "all_gather" and e.place[0] in _IN_EACH_PASS)
        ]

    if sent(run.ordinary) != sent(run.accumulated):
        yield "a backward pass under no_sync() changes what is sent in a step"


_IN_EACH_PASS = ("model", "layer", "backward", "gradient")
