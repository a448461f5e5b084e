"""What overlaps what: every algorithm does what it states (`dear.cost.overlap`), without a clock.

Whether these tests would notice: test_order_cuts.
"""

from __future__ import annotations

from typing import Any

import pytest

from dear.algorithms.synchronous.wfbp import Wfbp
from dear.cost.overlap import Unstated
from dear.training.algorithm import algorithm_names
from tests.contract.algorithms import (
    Meaning,
    algorithm_class,
    algorithm_options,
    skip_if_unavailable,
)
from tests.contract.by_hand import Network
from tests.contract.order import Run, statement, violations

LAYER_MB = 0.0001
"""Less than any layer's."""
NONE = {"fusion": "none", "small_kb": 0}
USUAL = {"mgs": {"density": 1.0}}
"""In place of the defaults: what it keeps back would add up and look like another layer's."""
APART: dict[str, tuple[dict[str, Any], ...]] = {
    "mgwfbp": ({"merge": "threshold", "threshold_mb": 0.0, "profile_steps": 1},),
    "bytescheduler": ({"partition_mb": LAYER_MB}, {"levels": 2}),
    "dear": (
        NONE,
        {**NONE, "update": "replicated"},
        {**NONE, "decouple": "reduce_broadcast"},
        {**NONE, "decouple": "reduce_broadcast", "update": "replicated"},
        {**NONE, "compression": "fp16"},
        {"fusion": "none", "compression": "topk", "density": 1.0},
        {"fusion": "wait_time", "small_kb": 0, "cycle_time_ms": 0.5},
        {"fusion": "none", "small_kb": 0.2},
    ),
    "ddp": ({"bucket_cap_mb": LAYER_MB}, {"bucket_cap_mb": LAYER_MB, "zero": True}),
    "fsdp": ({"min_mb": 0.0}, {"min_mb": 0.0, "stage": 2}),
    "dadt": ({"buffer_mb": 0.0}, {"buffer_mb": 0.0, "delay": 3}),
    "decentralized": ({"bucket_mb": LAYER_MB}, {"bucket_mb": LAYER_MB, "update": "step"}),
    "neighbor": (
        {"bucket_mb": LAYER_MB},
        {"bucket_mb": LAYER_MB, "combine": "atc"},
        {"bucket_mb": LAYER_MB, "combine": "atc", "every": 2},
    ),
    "gradient-tracking": ({"bucket_mb": LAYER_MB},),
    "exact-diffusion": ({"bucket_mb": LAYER_MB},),
    "push-diging": ({"bucket_mb": LAYER_MB},),
    "asyncddp": (
        {"bucket_mb": LAYER_MB},
        {"bucket_mb": LAYER_MB, "update": "step"},
        {"bucket_mb": LAYER_MB, "max_staleness": 1},
    ),
    **{
        name: tuple(
            {"bucket_mb": LAYER_MB, "barrier": barrier, "every": every}
            for barrier, every in [(False, 1), (False, 2), (True, 1)]
        )
        for name in ("win-put", "pull-get", "push-sum")
    },
}
"""Settings in which layers travel by themselves, which shows most."""


def cases() -> list[Any]:
    """Every algorithm with its defaults, with those settings, and those of the other tests."""
    found = {}
    for name in algorithm_names():
        meaning = Meaning.of(name)
        tested = [options for options in meaning.options if meaning.worlds(options, 2)]
        for options in [USUAL.get(name, {}), *APART.get(name, ()), *tested]:
            # A machine's ranks average in a thread of their own; a credit has a test of its own.
            if not {"hierarchical", "credit_mb"} & options.keys():
                told = "-".join([name, *map(str, options.values())])
                found[told] = pytest.param(name, options, id=told)
    return list(found.values())


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("name", "options"), cases())
def test_an_algorithm_does_what_it_states(name, options, native):
    if not native and "levels" in options:
        pytest.skip("refused: priorities are the comm core's")
    skip_if_unavailable(name)
    typed = algorithm_options(name, options)
    found = violations(algorithm_class(name)(), typed, native=native, every=options.get("every", 1))
    assert not found, "\n".join(found)


class Silent(Wfbp):
    """States nothing."""

    overlap = None


def test_an_algorithm_that_states_nothing_is_told_what_to_write():
    options = algorithm_options("wfbp", {})
    with pytest.raises(AssertionError, match=r"(?s)Silent does not state.*overlap = Overlap\("):
        violations(Silent(), options)
    with pytest.raises(AssertionError, match="says why"):
        statement(type("Mute", (Silent,), {"overlap": Unstated("secret")})(), options)


ALL = [[0, 1, 2, 3]]
FROM_BEHIND = [[3], [2], [1], [0]]
FROM_FRONT = [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("name", "options", "network", "groups"),
    [
        ("wfbp", {}, {}, FROM_BEHIND),
        # A message costs 10 layers' time: gradients wait for each other. Or next to nothing.
        ("mgwfbp", {}, {"alpha_s": 1e-2}, ALL),
        ("mgwfbp", {}, {"alpha_s": 1e-9}, FROM_BEHIND),
        ("mgwfbp", {"merge": "asc"}, {"alpha_s": 1e-2}, [[3], [0, 1, 2]]),
        ("mgwfbp", {"merge": "optimal"}, {"alpha_s": 1e-2}, ALL),
        ("mgwfbp", {"merge": "threshold", "threshold_mb": 0.0007}, {}, [[2, 3], [0, 1]]),
        ("mgs", {"density": 1.0}, {"alpha_s": 1e-2}, ALL),
        ("mgs", {"density": 1.0}, {"alpha_s": 1e-9}, FROM_BEHIND),
        ("dear", NONE, {}, [*FROM_BEHIND, *FROM_FRONT]),
        (
            "dear",
            {"small_kb": 0, "threshold_mb": 0.00095, "first_mb": None},
            {},
            [[3], [0, 1, 2], [0, 1, 2], [3]],
        ),
        ("dear", {"small_kb": 0, "fusion": "nearby_layers", "nearby_layers": -1}, {}, [*ALL, *ALL]),
        # One layer is at most 0.2 KB.
        ("dear", {"fusion": "none", "small_kb": 0.2}, {}, [[3], [2], [1], [0], [0], [2], [3]]),
        ("dear", {}, {}, ALL),
        ("dadt", {"buffer_mb": 0.0}, {}, FROM_BEHIND),
        ("dadt", {"buffer_mb": 0.00095}, {}, [[2, 3], [0, 1]]),
        ("dadt", {}, {}, ALL),
        ("ddp", {}, {}, ALL),
        ("ddp", {"bucket_cap_mb": LAYER_MB}, {}, FROM_BEHIND),
        ("fsdp", {"min_mb": 0.0, "stage": 2}, {}, [*FROM_FRONT, *FROM_BEHIND]),
        (
            "fsdp",
            {"min_mb": 0.0},
            {},
            [*FROM_FRONT, [3], [2], [3], [1], [2], [0], [1], [0]],
        ),
        ("bytescheduler", {}, {}, FROM_BEHIND),
        ("decentralized", {"bucket_mb": 0.00095}, {}, [[2, 3], [0, 1]]),
        ("neighbor", {"bucket_mb": 0.0005}, {}, [[0, 1], [2], [3]]),
        ("win-put", {"bucket_mb": 0.0005}, {}, [[0, 1], [2], [3]]),
    ],
)
def test_layers_travel_together_as_options_and_costs_say(name, options, network, groups):
    run = Run(algorithm_class(name)(), algorithm_options(name, options), Network(**network))
    assert run.groups() == groups
