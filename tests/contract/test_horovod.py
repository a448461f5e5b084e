"""Horovod's own settings reach it, and are refused where it cannot change them any more."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from dear.training.algorithm import algorithm_class
from tests.contract.loops import (
    difference,
    everybody,
    far_from_serial,
    make_model,
    make_sgd,
    message,
    mine,
    steps,
    wrap,
)

_MISSING = algorithm_class("horovod").unavailable()
horovod = pytest.mark.skipif(bool(_MISSING), reason=str(_MISSING))


def _with(options: dict[str, Any]) -> dict[str, Any]:
    import horovod.torch as hvd

    at_start: dict[str, str] = {}
    init = hvd.init

    def noting() -> None:
        at_start.update({k: v for k, v in os.environ.items() if k.startswith("HOROVOD_")})
        init()

    hvd.init = noting
    model, wanted = make_model(), make_model()
    optimizer = wrap(make_sgd(model), model, "horovod", **options)
    steps(model, optimizer, mine())
    steps(wanted, make_sgd(wanted), everybody())
    far = difference(model, wanted)
    optimizer.close()
    other = {**options, "cycle_time_ms": 7.5}
    said = message(lambda: wrap(make_sgd(model), model, "horovod", **other))
    # What is not read at the start only may change.
    free = message(lambda: wrap(make_sgd(model), model, "horovod", compression="fp16", **options))
    names = ("FUSION_THRESHOLD", "CYCLE_TIME", "CACHE_CAPACITY", "AUTOTUNE")
    return {
        "far": far,
        "said": said,
        "free": free,
        "at start": [at_start.get(f"HOROVOD_{name}") for name in names],
        "left": [os.environ.get(f"HOROVOD_{name}") for name in names],
    }


@horovod
@pytest.mark.parametrize(
    ("options", "at_start"),
    [
        (
            {"fusion_threshold_mb": 0.5, "cycle_time_ms": 2.0, "cache_capacity": 0},
            ["524288", "2.0", "0", None],
        ),
        ({"fusion_threshold_mb": 0.0, "autotune": True}, ["0", None, None, "1"]),
    ],
)
def test_settings_are_there_when_horovod_starts_and_cannot_change(own_pool, options, at_start):
    for seen in own_pool(2).run(_with, options):
        assert seen["far"] < 1e-5
        assert seen["at start"] == at_start
        assert seen["left"] == [None] * 4
        assert "option of horovod 'cycle_time_ms'=7.5" in seen["said"]
        assert "runs in this process already" in seen["said"]
        assert seen["free"] == ""


def _large() -> list[float]:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrap(optimizer, model, "horovod", compression="fp16")
    model(torch.tensor([[40000.0, -40000.0]])).sum().backward()
    gradient = model.weight.grad.view(-1).tolist()
    optimizer.close()
    return gradient


@horovod
def test_half_precision_on_the_wire_is_near_and_does_not_overflow(world):
    far = far_from_serial(world(2, "horovod"), "horovod", options={"compression": "fp16"})
    assert 1e-7 < far < 1e-3
    assert world(2, "horovod").run(_large) == [[40000.0, -40000.0]] * 2
