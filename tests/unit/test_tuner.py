"""Tuning of the fusion threshold: when it samples, what it proposes, and that ranks agree."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import dear
from dear.algorithms.synchronous.dear import Dear
from dear.training.tuning import LEAST_MB, MOST_MB, Tuned, Tuner
from tests.contract.loops import difference, everybody, make_model, make_sgd, mine, steps, wrap
from tests.contract.pairs import one_in

pytest.importorskip("bayes_opt")


FIRST = {"threshold_mb": 25.0}


class Alone:
    """A communicator of one rank whose clock the test moves."""

    rank = 0
    now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def broadcast_object(self, value: Any) -> Any:
        return value


def _step_s(threshold_mb: float) -> float:
    """A made-up step, shortest at 16 MB."""
    return 0.2 + 0.01 * (math.log2(threshold_mb) - 4) ** 2


@functools.cache
def _tune(seed: int) -> tuple[list[int], dict, float]:
    """Steps with a sample, findings after the last step, and the threshold in use in the end."""
    communicator, tuner = Alone(), Tuner(FIRST, seed=seed)
    tuned = Tuned(Dear.Options(fusion="tuned"), tuner, communicator)
    sampled: list[int] = []
    findings: dict = {}
    for step in range(1, 61):
        communicator.now_s += _step_s(tuned.options.threshold_mb)
        before = len(tuner.tried)
        tuned.after_step()
        if len(tuner.tried) > before:
            sampled.append(step)
        if step == tuned.last_step:
            findings = tuned.findings()["tuner"]
    return sampled, findings, tuned.options.threshold_mb


def test_samples_are_taken_and_the_best_installed_at_the_worked_steps():
    sampled, _, _ = _tune(0)
    assert sampled == [6, 11, 16, 21, 26, 31, 36, 41, 46, 51]
    assert Tuned(Dear.Options(fusion="tuned"), Tuner(FIRST, seed=0), Alone()).last_step == 52


def test_what_was_tried_and_what_stayed_is_told():
    tuned = Tuned(Dear.Options(fusion="tuned"), Tuner(FIRST, seed=0), Alone())
    assert tuned.findings() == {"tuner": {"tried": [], "threshold_mb": None, "wall_s": 0.0}}
    _, result, _ = _tune(0)
    assert len(result["tried"]) == 10 and result["tried"][0]["threshold_mb"] == 25.0
    assert all(item["step_s"] > 0.19 for item in result["tried"])
    best = min(result["tried"], key=lambda item: item["step_s"])
    assert result["threshold_mb"] == best["threshold_mb"]


@pytest.mark.parametrize("seed", range(2))
def test_it_stays_within_bounds_and_ends_near_the_best(seed):
    _, findings, chosen = _tune(seed)
    tried = [item["threshold_mb"] for item in findings["tried"]]
    assert tried[0] == 25.0
    assert all(LEAST_MB <= threshold <= MOST_MB for threshold in tried)
    assert len(set(tried)) > 5
    assert chosen == pytest.approx(min(tried, key=_step_s))
    assert _step_s(chosen) <= 1.05 * _step_s(16)


def _trained() -> tuple[float, list[float]]:
    model, wanted = make_model(), make_model()
    make = torch.optim.AdamW
    optimizer, serial = make(model.parameters(), 0.01), make(wanted.parameters(), 0.01)
    wrap(optimizer, model, "dear", fusion="tuned", first_mb=256.0)
    thresholds = []
    rule = optimizer._engine._rule

    def after_step(*_: Any) -> None:
        thresholds.append(rule.options.threshold_mb)

    steps(model, optimizer, mine(), range(54), after_step=after_step)
    steps(wanted, serial, everybody(), range(54))
    far = difference(model, wanted)
    optimizer.close()
    return far, thresholds


def test_training_is_serial_training_and_ranks_always_agree(world):
    seen = world(3).run(_trained)
    assert max(far for far, _ in seen) < 1e-4
    assert seen[0][1] == seen[1][1] == seen[2][1]
    assert len(set(seen[0][1])) > 5


def _partitions_trained(tune: str) -> tuple[float, list[tuple[float, float, int]]]:
    model, wanted = make_model(), make_model()
    optimizer, serial = make_sgd(model), make_sgd(wanted)
    wrap(optimizer, model, "bytescheduler", tune=tune, partition_mb=2e-5, credit_mb=1e-4)
    engine = optimizer._engine
    bounds = {"partition_mb": (1e-5, 1e-3), "credit_mb": (1e-5, 1e-3)}
    bounds = {name: bounds[name] for name in engine._rule.options.tuned()}
    first = {"partition_mb": 2e-5, "credit_mb": 1e-4}
    engine._rule = Tuned(engine._rule.options, Tuner(first, bounds), engine.communicator)
    used = []

    def after_step(*_: Any) -> None:
        options = engine._rule.options
        assert engine._credit == options.credit_mb * 2**20
        used.append((options.credit_mb, options.partition_mb, len(engine._partitions)))

    steps(model, optimizer, mine(), range(56), after_step=after_step)
    steps(wanted, serial, everybody(), range(56))
    optimizer.synchronize()
    far = difference(model, wanted)
    assert len(engine.findings()["tuner"]["tried"]) == (10 if dear.rank() == 0 else 0)
    optimizer.close()
    return far, used


@pytest.mark.parametrize("tune", one_in(3, ["both", "credit", "partition"]))
def test_bytescheduler_trains_serially_while_its_sizes_change(world, tune):
    seen = world(3).run(_partitions_trained, tune)
    assert max(far for far, _ in seen) < 1e-4
    assert seen[0][1] == seen[1][1] == seen[2][1]
    credits, partitions, counts = (len(set(values)) for values in zip(*seen[0][1], strict=True))
    assert (credits > 5, partitions > 5, counts > 1) == (
        tune != "partition",
        tune != "credit",
        tune != "credit",
    )


class Failing(Tuner):
    def propose(self) -> dict[str, float]:
        raise ValueError("no idea")


def _tuner_fails() -> str:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear", fusion="tuned")
    optimizer._engine._rule._tuner = Failing(FIRST)
    try:
        steps(model, optimizer, mine(), range(8))
    except RuntimeError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


def test_a_tuner_that_fails_is_an_error_on_all_ranks(world):
    output = world(2).run(_tuner_fails)
    assert ["no idea" in text for text in output] == [True, True]
