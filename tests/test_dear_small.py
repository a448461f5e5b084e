"""Groups of a few KB: how many messages a step of `dear` takes."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest

from dear.comm import runtime
from tests.test_optimizer import make_model, make_sgd, mine, steps, wrap

_CALLS = ("all_reduce", "reduce_scatter", "all_gather")


def _messages(options: dict[str, Any]) -> dict[str, int]:
    """Collectives of one step, by name, once groups are laid out."""
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear", **options)
    steps(model, optimizer, mine(), range(1))
    communicator, seen = runtime.communicator(), Counter[str]()
    with mock.patch.multiple(
        communicator, **{name: _counted(communicator, name, seen) for name in _CALLS}
    ):
        steps(model, optimizer, mine(), range(1, 2))
    optimizer.close()
    return dict(seen)


def _counted(communicator: Any, name: str, seen: Counter[str]) -> Any:
    call = getattr(communicator, name)

    def counted(*args: Any, **options: Any) -> Any:
        seen[name] += 1
        return call(*args, **options)

    return counted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"small_kb": 8}, {"all_reduce": 1}),
        ({"small_kb": 0}, {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1}),
        # Weights of 192, 256 and 128 bytes, biases of 32, 32 and 16: the last one to arrive is
        # small, and carries the marks.
        (
            {"small_kb": 0.2, "fusion": "none"},
            {"all_reduce": 5, "reduce_scatter": 1, "all_gather": 1},
        ),
        # The last one to arrive is not: the marks travel alone.
        (
            {"small_kb": 0.05, "fusion": "none"},
            {"all_reduce": 4, "reduce_scatter": 3, "all_gather": 3},
        ),
        (
            {"small_kb": 8, "fusion": "none", "decouple": "reduce_broadcast"},
            {"all_reduce": 1},
        ),
        (
            {"small_kb": 8, "update": "replicated", "compression": "bf16"},
            {"all_reduce": 1},
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)
def test_a_small_group_is_one_message_and_may_carry_the_marks(world, options, wanted):
    assert world(2).run(_messages, options) == [wanted] * 2
