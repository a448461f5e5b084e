"""Order of collectives: whenever messages end, all ranks make the same calls in the same order.

A rank's script runs several times on a `Network` whose messages end at other moments each time.
What it sends must be the same, since two of the runs could be two ranks.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from dear.buckets import parts
from dear.errors import UserError
from tests.contract.algorithms import algorithm_class, algorithm_options
from tests.contract.logged import Program
from tests.contract.network import Network, on
from tests.contract.test_order import LAYER_MB, cases

CREDIT = {"partition_mb": LAYER_MB, "credit_mb": 0.0003, "profile_steps": 1}
CREDITS = [
    pytest.param("bytescheduler", {**CREDIT, **more}, id="-".join(["bytescheduler-credit", *more]))
    for more in ({}, {"compression": "fp16"}, {"credit_mb": 1e-6})
]
ONE_SIDED = ("put", "get")
"""Messages that need no call of another rank."""
Sent = dict[Hashable, list[tuple[Any, ...]]]


def by_chance() -> bool:
    return random.random() < 0.4


PACES = {"late": lambda: False, "early": lambda: True, "mixed": by_chance}
"""Functions that return whether the oldest message ends now, though nobody waits for it."""


class Paced(Network):
    """Network whose messages also end while layers run, at its pace."""

    def __init__(self, *, native: bool, alpha_s: float = 1e-9) -> None:
        super().__init__(native=native, alpha_s=alpha_s)
        self.ends = PACES["late"]

    def compute(self, seconds: float, part: Any = None) -> None:
        super().compute(seconds, part)
        while self.under_way and self.ends():
            self.end(self.under_way[0])

    def sent(self) -> Sent:
        """Returns the messages of each channel that all ranks must send in the same order."""
        sent: Sent = {}
        for m in [event.message for event in self.log if event.what == "start"]:
            if m is not None and m.operation not in ONE_SIDED:
                sent.setdefault(m.channel, []).append((m.operation, m.nbytes, sorted(m.layers)))
        return sent


def fail(gradient: torch.Tensor) -> None:
    raise MemoryError


def failed(program: Program, layer: int) -> None:
    """A backward pass ends with an error before a layer has its gradient."""
    program.optimizer.zero_grad()
    failing = program.model[layer].register_forward_hook(
        lambda *given: given[-1].register_hook(fail) and None
    )
    with pytest.raises(MemoryError):
        program.backward()
    failing.remove()


def failed_and_updated(program: Program) -> None:
    failed(program, 1)
    program.update()


def left_out(program: Program) -> None:
    """A batch is left out after its backward pass."""
    program.optimizer.zero_grad()
    program.backward()


def without_a_layer(program: Program) -> None:
    """A layer gets no gradient in one step."""
    weight = program.model[2].weight.requires_grad_(False)
    program.train(1)
    weight.requires_grad_(True)


def twice(program: Program) -> None:
    """Gradients add up over two passes, both of which are averaged."""
    program.optimizer.zero_grad()
    program.backward()
    program.backward()
    program.update()


def synchronized(program: Program) -> None:
    program.optimizer.zero_grad()
    program.backward()
    program.optimizer.synchronize()
    program.update()


def no_pass(program: Program) -> None:
    program.optimizer.zero_grad()
    program.update()


def accumulated(program: Program) -> None:
    program.train(1, paused=True)


PARTS: list[Callable[[Program], object]] = [
    accumulated,
    without_a_layer,
    synchronized,
    no_pass,
    left_out,
    twice,
]
FAILING: list[Callable[[Program], object]] = [
    *[functools.partial(failed, layer=layer) for layer in range(4)],
    failed_and_updated,
]


def settled(name: str, options: dict[str, Any], network: Paced) -> Program:
    typed = algorithm_options(name, options)
    ends, network.ends = network.ends, PACES["late"]  # measured times are rank 0's in every run
    program = Program(algorithm_class(name)(), typed, network)
    program.train(typed.settling_steps() + 2)
    network.ends = ends
    return program


def all_parts(name: str, options: dict[str, Any], network: Paced) -> list[str]:
    """Runs ordinary steps between all parts; returns the messages of errors.

    An algorithm that refuses to go on after a failed pass ends the script.
    """
    errors = []
    program = settled(name, options, network)
    for part in [*PARTS, *FAILING]:
        try:
            part(program)
            program.train(2)
        except UserError as error:
            errors.append(str(error))
            if part in FAILING:
                return errors
            with contextlib.suppress(UserError):
                program.optimizer.close()
            program = settled(name, options, network)
    program.optimizer.close()
    return errors


def two_optimizers(name: str, options: dict[str, Any], network: Paced) -> list[str]:
    """Runs a script that trains two models by a common loss, as one that trains a GAN."""
    programs = [settled(name, options, network) for _ in range(2)]
    for _ in range(3):
        for program in programs:
            program.optimizer.zero_grad()
        sum(program.model(torch.zeros(())) for program in programs).backward()
        for program in programs:
            program.update()
    for program in programs:
        program.optimizer.close()
    return []


def matched() -> list[Any]:
    """Returns the cases of algorithms whose messages need calls of other ranks.

    Marked `full` are those after the first of each algorithm, and those that measure much. Horovod
    has a network of its own.
    """
    chosen, seen = [], {"auto"}
    for case in cases():
        name, options = case.values
        if name != "horovod" and algorithm_class(name).capabilities.consistency != "asynchronous":
            marks = [pytest.mark.full] if name in seen else []
            chosen.append(pytest.param(name, options, id=case.id, marks=marks))
            seen.add(name)
    return chosen


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Network], None]:
    """Function that lets messages end on a network while somebody waits for a part to start."""

    def on_network(network: Network) -> None:
        class Meanwhile(threading.Condition):
            def wait_for(self, started: Callable[[], bool], timeout: float | None = None) -> bool:
                while not started():
                    network.pause(0.0)
                return True

        monkeypatch.setattr(parts.threading, "Condition", Meanwhile)

    return on_network


@pytest.mark.parametrize(
    ("script", "native"),
    [
        (all_parts, True),
        (two_optimizers, False),
        pytest.param(all_parts, False, marks=pytest.mark.full),
        pytest.param(two_optimizers, True, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(("name", "options"), [*CREDITS, *matched()])
def test_what_is_sent_does_not_depend_on_when_messages_end(name, options, script, native, waits):
    if not native and "levels" in options:
        pytest.skip("refused: priorities are the comm core's")
    random.seed(0)
    runs = {}
    for pace, ends in PACES.items():
        network = Paced(native=native)
        network.ends = ends
        waits(network)
        with on(network):
            try:
                errors = script(name, options, network)
            except UserError as error:  # as it wraps
                pytest.skip(str(error))
        runs[pace] = network.sent(), errors
    assert runs["early"] == runs["late"] == runs["mixed"]


@pytest.mark.parametrize("options", [{"levels": 1}, CREDIT])
def test_parts_that_never_start_hold_up_no_close(options, waits):
    """Messages take longer than passes, so parts of the first layer go before those of others."""
    network = Paced(native=True, alpha_s=1.0)
    waits(network)
    with on(network):
        program = settled("bytescheduler", options, network)
        failed(program, 0)
        program.optimizer.close()
