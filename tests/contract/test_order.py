"""What overlaps what: in which order algorithms compute, send and wait.

Of a job of two ranks one is here: what it sends ends when somebody waits for it. So a test sees
the order whatever the machine is doing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dear.comm.communicator import Communicator
from tests.contract.algorithms import algorithm_class, algorithm_options

WIDTHS = (4, 8, 16, 4)
"""Of the layers 0, 1, 2; what they send is told apart by its size."""
LAYERS = {a * b: i for i, (a, b) in enumerate(itertools.pairwise(WIDTHS))}


class Transfer:
    """A collective that ends in its first `wait`.

    Args:
        name: None: it is not told of.
    """

    def __init__(self, job: ByHand, name: str | None, effect: Callable[[], Any]) -> None:
        self._job, self._name, self._effect = job, name, effect
        self._step, self._ended = job.step, False

    def wait(self, timeout_s: float | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        with torch.no_grad():
            self._effect()
        if self._name is not None:
            ago = self._job.step - self._step
            self._job.log.append(f"wait {self._name}" + (f", {ago} ago" if ago else ""))

    def done(self) -> bool:
        return self._ended


class ByHand(Communicator):
    """Rank 0 of two that do the same; `log` has what was started and what was waited for."""

    def __init__(self) -> None:
        self.rank, self.size, self.timeout = 0, 2, None
        self.backend = "by hand"
        self.native = self.record_times = False
        self.clock, self.pause = time.perf_counter, time.sleep
        self.blocked_s, self.bytes_sent = 0.0, 0
        self.channel_free_s: dict[int, float] = {}
        self.groups: list[Any] = [None]
        self.log: list[str] = []
        self.step = 0

    def ensure_channels(self, count: int) -> None:
        self.groups += [None] * (count - len(self.groups))

    def all_reduce(self, tensor: Any, *, op: str, **queue: int) -> Any:
        return self._start("all_reduce", tensor, lambda: op == "sum" and tensor.mul_(2))

    def reduce_scatter(self, output: Any, input: Any, *, op: str, **queue: int) -> Any:
        half = input[: output.numel()]
        return self._start("reduce", input, lambda: output.copy_(half * (1 + (op == "sum"))))

    def all_gather(self, output: Any, input: Any, **queue: int) -> Any:
        half = output[: input.numel()]
        return self._start("gather", output, lambda: half.copy_(input))

    def reduce(self, tensor: Any, *, root: int, op: str, **queue: int) -> Any:
        return self._start("reduce", tensor, lambda: op == "sum" and tensor.mul_(2))

    def broadcast(self, tensor: Any, *, root: int, **queue: int) -> Any:
        return self._start("gather", tensor, lambda: None)

    def exchange(self, recv: Any, send: Any, *, peer: int, channel: int = 0) -> Any:
        return self._start("exchange", send, lambda: recv.copy_(send))

    def broadcast_object(self, value: Any, *, root: int = 0) -> Any:
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * 2

    def barrier(self) -> None:
        return

    def _start(self, kind: str, tensor: torch.Tensor, effect: Callable[[], Any]) -> Any:
        # Marks of who has a gradient may come behind a layer, or alone.
        layer = [i for size, i in LAYERS.items() if size <= tensor.numel() < size + 8]
        if not layer:
            return Transfer(self, None, effect)
        name = f"{kind} {layer[0]}"
        self.log.append(name)
        return Transfer(self, name, effect)


def order_of_a_step(algorithm: str, **options: Any) -> list[str]:
    """What happens from the end of one forward pass to that of the next, after some steps.

    "forward i" and "gradient i" are layer i's, "step" and "stepped" are around `step()`; "2 ago" is
    what was started two steps before.
    """
    torch.manual_seed(1)
    shapes = itertools.pairwise(WIDTHS)
    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))
    communicator = ByHand()
    log = communicator.log
    for i, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: log.append(f"gradient {i}"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    typed = algorithm_options(algorithm, options)
    algorithm_class(algorithm)().wrap(model, optimizer, communicator, typed)
    for i, layer in enumerate(model):  # after the hooks of the algorithm
        layer.register_forward_pre_hook(lambda *_, i=i: log.append(f"forward {i}"))
    for step in range(6):
        loss = model(torch.ones(2, WIDTHS[0])).square().sum()
        if step == 5:
            break
        log.clear()
        communicator.step = step
        optimizer.zero_grad()
        loss.backward()
        log.append("step")
        optimizer.step()
        log.append("stepped")
    return list(log)


GRADIENTS = ["gradient 2", "gradient 1", "gradient 0"]
FORWARDS = ["forward 0", "forward 1", "forward 2"]


def between(lists: list[list[str]]) -> list[str]:
    """The first of each, then the second of each, ..."""
    return [one for several in zip(*lists, strict=True) for one in several]


def each(what: str, layers: str, ago: str = "") -> list[str]:
    return [f"{what} {layer}{ago}" for layer in layers]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("wfbp", {}),
        ("wfbp", {"channels": 2}),
        ("mgwfbp", {"merge": "threshold", "threshold_mb": 0.0, "profile_steps": 1}),
    ],
)
def test_every_gradient_is_sent_before_the_next_one_is_there(algorithm, options):
    assert order_of_a_step(algorithm, **options) == [
        *between([GRADIENTS, each("all_reduce", "210")]),
        *each("wait all_reduce", "210"),
        "step",
        "stepped",
        *FORWARDS,
    ]


def test_allreduce_sends_when_the_backward_pass_is_over():
    assert order_of_a_step("allreduce") == [
        *GRADIENTS,
        *each("all_reduce", "012"),
        *each("wait all_reduce", "012"),
        "step",
        "stepped",
        *FORWARDS,
    ]


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("decouple", ["reduce_scatter_all_gather", "reduce_broadcast"])
def test_the_first_halves_of_dear_are_hidden_by_the_backward_pass_the_second_by_the_next_forward(
    update, decouple
):
    options = {"fusion": "none", "small_kb": 0, "update": update, "decouple": decouple}
    assert order_of_a_step("dear", **options) == [
        *between([GRADIENTS, each("reduce", "210")]),
        "step",
        *each("wait reduce", "210"),
        *each("gather", "012"),  # in the order in which layers run; nobody waits for them
        "stepped",
        *between([each("wait gather", "012"), FORWARDS]),
    ]


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_an_update_of_dadt_waits_for_gradients_of_earlier_steps_only(delay):
    assert order_of_a_step("dadt", buffer_mb=0.0, delay=delay) == [
        *between([GRADIENTS, each("all_reduce", "210")]),
        "step",
        *each("wait all_reduce", "210", f", {delay} ago"),
        "stepped",
        *FORWARDS,
    ]
