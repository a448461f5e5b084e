"""Averages that average nothing: does the comparison with serial references notice?"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any
from unittest import mock

import pytest

from dear.comm.communicator import Batch, Communicator
from dear.training.parameters.exchange import GraphExchange
from tests.contract.algorithms import Meaning, algorithm_names, skip_if_unavailable
from tests.contract.training import OnRank, Script, States, far
from tests.contract.wrong_programs import forgetting

TOLERANCE = 2e-5
"""Cases of test_reference."""
_EXCHANGES = (
    "dear.algorithms.decentralized.decentralized:GroupExchange",
    "dear.algorithms.decentralized.push_diging:PushDigingExchange",
    "dear.algorithms.decentralized.gradient_tracking:GradientTrackingExchange",
    "dear.algorithms.asynchronous.pull_get:PullExchange",
    "dear.algorithms.asynchronous.push_sum:PushSumExchange",
    "dear.algorithms.asynchronous.asyncddp:AsyncExchange",
    "dear.training.parameters.windows:WindowExchange",
)


class MixingNothing(OnRank):
    """Waits for what has come from others, and leaves the parameters as they were."""

    def run(self) -> States:
        with contextlib.ExitStack() as cuts:
            for place in _EXCHANGES:
                module, _, name = place.partition(":")
                kind = getattr(importlib.import_module(module), name)
                if "mix" in vars(kind):
                    cuts.enter_context(forgetting(kind))
            cuts.enter_context(forgetting(GraphExchange))
            return super().run()


class SendingNothing(OnRank):
    """Sums over ranks are this rank's own values, as often as there are ranks."""

    def run(self) -> States:
        def alone(self: Any, tensor: Any, *, op: str, **_: Any) -> Any:
            tensor.mul_(self.size if op == "sum" else 1)
            return _Ended()

        def scattered(self: Any, output: Any, input: Any, *, op: str, **_: Any) -> Any:
            start = self.rank * output.numel()
            output.copy_(input[start : start + output.numel()] * self.size)
            return _Ended()

        with (
            mock.patch.object(Communicator, "all_reduce", alone),
            mock.patch.object(Batch, "start", lambda self, tensor: None),
            mock.patch.object(Communicator, "reduce_scatter", scattered),
        ):
            return super().run()


class _Ended:
    nbytes = 0

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True

    def on_complete(self, callback: Any) -> None:
        callback()


MIXING = [n for n in algorithm_names() if not Meaning.of(n).averages_gradients]


def _far(world: Any, name: str, kind: Any) -> float:
    skip_if_unavailable(name)
    options = Meaning.of(name).options[0]
    return far(world(2), 2, name, options, Script(model="plain"), kind)


@pytest.mark.parametrize("name", MIXING)
def test_mixing_that_mixes_nothing_is_noticed(world, name):
    assert _far(world, name, OnRank) < TOLERANCE < 1e-3 < _far(world, name, MixingNothing)


@pytest.mark.parametrize("name", ["allreduce", "wfbp", "mgwfbp", "bytescheduler", "dear", "dadt"])
def test_averages_of_one_rank_alone_are_noticed(world, name):
    assert _far(world, name, OnRank) < TOLERANCE < 1e-3 < _far(world, name, SendingNothing)
