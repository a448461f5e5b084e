"""A network whose transfers end when a test says so, and a log of what happens on it.

There is no clock and no thread: time stands still but for what passes and transfers are said to
take. What a message carries is seen by its values: those of each layer's parameters, and of its
gradients, lie in ranges of their own (`PARAMETER`, `GRADIENT`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dear.cost.overlap import Content

SIZES = (64, 32, 128, 96)
"""Elements of the layers, in the order in which they run; no two are alike."""
PARAMETER = [2.0 ** (4 * i + 4) for i in range(len(SIZES))]
GRADIENT = [2.0 ** -(4 * i + 8) for i in range(len(SIZES))]
LEAST, MOST = 0.24, 3.8
"""A value may be halved on its way, or weighed, or be the sum of two passes."""

Place = tuple[str, int | None]
"""Subject of an event: "model"; "layer" or "gradient" and its number; "backward", before the
first gradient; "pass"; "step"; "" is none of them."""


@dataclass(eq=False, kw_only=True)
class Message:
    """A transfer, from its start on."""

    operation: str
    layers: frozenset[int]
    carries: frozenset[Content]
    """Empty: it carries neither; a barrier of all ranks is such a message, too."""
    nbytes: int
    step: int
    place: Place
    priority: int = 0
    channel: int = 0
    ended: bool = False

    def __str__(self) -> str:
        what = " and ".join(sorted(self.carries)) or "neither gradients nor parameters"
        of = f" of layers {sorted(self.layers)}" if self.layers else ""
        return f"{self.operation} with {what}{of}"


@dataclass(frozen=True, kw_only=True)
class Event:
    """`start` of a message, `wait` for one that has not ended, its `end`, or an `update`."""

    what: str
    step: int
    place: Place
    layers: frozenset[int]
    message: Message | None = None


@dataclass(eq=False)
class Network:
    """Log of what is under way, and what has happened.

    Args:
        alpha_s, beta_s: seconds of a message and of a byte, on the clock that algorithms see.
        layer_s: of a layer's pass.
    """

    native: bool = True
    alpha_s: float = 1e-4
    beta_s: float = 0.0
    layer_s: float = 1e-3
    ends_itself: bool = True
    """Waiting ends; where False, it is an error."""
    events: list[Event] = field(default_factory=list)
    under_way: list[Work] = field(default_factory=list)
    step: int = 0
    place: Place = ("", None)
    now_s: float = 0.0

    def start(
        self,
        operation: str,
        tensor: torch.Tensor,
        effect: Callable[[], Any] = lambda: None,
        behind: Work | None = None,
        **queue: int,
    ) -> Work:
        """`behind`: what ends before this, whatever happens."""
        layers, carries = content_of(tensor)
        message = Message(
            operation=operation,
            layers=layers,
            carries=carries,
            nbytes=tensor.nbytes,
            step=self.step,
            place=self.place,
            **queue,
        )
        self.note("start", message)
        work = Work(self, message, effect, behind)
        self.under_way.append(work)
        return work

    def note(
        self, what: str, message: Message | None, layers: frozenset[int] | None = None
    ) -> None:
        layers = message.layers if message is not None else layers or frozenset()
        self.events.append(
            Event(what=what, step=self.step, place=self.place, layers=layers, message=message)
        )

    def end(self, *works: Work) -> None:
        """Lets some transfers end, or all that are under way and what starts as they end."""
        if works:
            for work in works:
                work.end()
            return
        while self.under_way:
            self.under_way[0].end()

    def meet(self, name: str) -> None:
        """All ranks wait for each other."""
        work = self.start(name, torch.zeros(0))
        work.wait()

    def clock(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        """Somebody looks again and again whether something has changed: what is oldest ends."""
        if not self.under_way:
            raise AssertionError("somebody waits for what nobody has sent")
        self.under_way[0].wait()


class Work:
    """A transfer as algorithms see it."""

    def __init__(
        self,
        network: Network,
        message: Message,
        effect: Callable[[], Any],
        behind: Work | None = None,
    ) -> None:
        self._network, self.message, self._effect, self._behind = network, message, effect, behind
        self._callbacks: list[Callable[[], None]] = []
        self.nbytes = message.nbytes
        self.awaited_by_torch = False

    def wait(self, timeout_s: float | None = None) -> None:
        if self.message.ended:
            return
        if self._behind is not None:
            self._behind.wait()
        self._network.note("wait", self.message)
        if not self._network.ends_itself:
            raise AssertionError(f"waits for {self.message}")
        self.end()

    def end(self) -> None:
        if self._behind is not None and not self._behind.message.ended:
            self._behind.end()
        network = self._network
        self.message.ended = True
        network.under_way.remove(self)
        network.now_s += network.alpha_s + network.beta_s * self.nbytes
        with torch.no_grad():
            self._effect()
        network.note("end", self.message)
        for callback in self._callbacks:
            callback()

    def done(self) -> bool:
        return self.message.ended

    is_completed = done

    def on_complete(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)


def content_of(tensor: torch.Tensor) -> tuple[frozenset[int], frozenset[Content]]:
    """The layers that a message has values of, and what kind of values; bytes count as floats."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().contiguous().reshape(-1)
    if flat.dtype == torch.uint8:
        flat = flat[: flat.numel() // 4 * 4].view(torch.float32)
    content: list[tuple[int, Content]] = []
    if not flat.is_floating_point():
        return frozenset(), frozenset()
    kinds: list[tuple[Content, list[float]]] = [("parameters", PARAMETER), ("gradients", GRADIENT)]
    for kind, codes in kinds:
        for layer, code in enumerate(codes):
            if bool(((flat > LEAST * code) & (flat < MOST * code)).any()):
                content.append((layer, kind))
    return frozenset(layer for layer, _ in content), frozenset(kind for _, kind in content)
