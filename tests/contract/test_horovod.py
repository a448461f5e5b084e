"""Horovod's own settings reach it, and are refused where it cannot change them any more."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.contract.algorithms import skip_if_unavailable
from tests.contract.loops import make_model, make_sgd, message, train_both, wrap


def _with(options: dict[str, Any]) -> dict[str, Any]:
    import horovod.torch as hvd

    at_start: dict[str, str] = {}
    init = hvd.init

    def noting() -> None:
        at_start.update({k: v for k, v in os.environ.items() if k.startswith("HOROVOD_")})
        init()

    hvd.init = noting
    far, model = train_both("horovod", options=options), make_model()
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
    skip_if_unavailable("horovod")
    for seen in own_pool(2).run(_with, options):
        assert seen["far"] < 1e-5
        assert seen["at start"] == at_start
        assert seen["left"] == [None] * 4
        assert "option of horovod 'cycle_time_ms'=7.5" in seen["said"]
        assert "runs in this process already" in seen["said"]
        assert seen["free"] == ""
