"""Trials as an experiment would make them, for tests of what is made of their results."""

from __future__ import annotations

from typing import Any

from common.emulation.config import Fault
from common.harness.trial import MeasureConfig, OptimizerConfig, Trial, options_of


def make_trial(algorithm: str, world: int = 4, **more: Any) -> Trial:
    """A small trial; `more` are fields that differ, options and fault as an experiment has them."""
    fields = {
        "model": "mnist_cnn",
        "batch_size": 8,
        "sentence_len": None,
        "launcher": "local",
        "backend": "gloo",
        "device": "cpu",
        "dtype": "float32",
        "seed": 1,
        "threads_per_rank": 1,
        "optimizer": OptimizerConfig(),
        "measure": MeasureConfig(),
        "label": algorithm,
    }
    options = options_of(algorithm, more.pop("options", {}))
    fault = Fault(**more.pop("fault")) if more.get("fault") else None
    return Trial(
        algorithm=algorithm,
        world_size=world,
        options=options,
        fault=fault,
        **{**fields, **more},
    )
