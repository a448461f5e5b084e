"""What overlaps what: in which order algorithms compute, send and wait."""

from __future__ import annotations

import pytest

from tests.contract.by_hand import order_of_a_step

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
