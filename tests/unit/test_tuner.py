"""Tuning of the fusion threshold: when it samples, what it proposes, and that ranks agree."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

import dear
from dear.algorithms.synchronous.dear import Dear
from dear.training.tuning import LEAST_MB, MOST_MB, Tuned, Tuner
from tests.contract.loops import difference, everybody, make_model, make_sgd, mine, steps, wrap

pytest.importorskip("bayes_opt")


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


def _tune(tuner: Tuner) -> tuple[list[int], list[float], float]:
    """Steps with a sample, thresholds tried, and the one in use in the end."""
    communicator = Alone()
    tuned = Tuned(Dear.Options(fusion="tuned"), tuner, communicator)
    sampled: list[int] = []
    for step in range(1, 61):
        communicator.now_s += _step_s(tuned.options.threshold_mb)
        before = len(tuner.tried)
        tuned.after_step()
        if len(tuner.tried) > before:
            sampled.append(step)
    return sampled, [tried for tried, _ in tuner.tried], tuned.options.threshold_mb


def test_samples_are_taken_and_the_best_installed_at_the_worked_steps():
    sampled, _, _ = _tune(Tuner())
    assert sampled == [6, 11, 16, 21, 26, 31, 36, 41, 46, 51]
    assert Tuned(Dear.Options(fusion="tuned"), Tuner(), Alone()).last_step == 52


@pytest.mark.parametrize("seed", range(5))
def test_it_stays_within_bounds_and_ends_near_the_best(seed):
    tuner = Tuner(seed=seed)
    _, tried, chosen = _tune(tuner)
    assert tried[0] == 25.0
    assert all(LEAST_MB <= threshold <= MOST_MB for threshold in tried)
    assert len(set(tried)) > 5
    assert chosen == pytest.approx(min(tried, key=_step_s))
    assert _step_s(chosen) <= 1.05 * _step_s(16)


def test_measured_times_are_those_of_whole_steps():
    tuner = Tuner()
    _tune(tuner)
    for threshold, step_s in tuner.tried:
        assert step_s == pytest.approx(_step_s(threshold))


def test_the_first_trial_is_moved_into_the_bounds():
    assert Tuner(first_mb=1e6)._current == MOST_MB


def _trained() -> tuple[float, list[float]]:
    model, wanted = make_model(), make_model()
    make = torch.optim.AdamW
    optimizer, serial = make(model.parameters(), 0.01), make(wanted.parameters(), 0.01)
    wrap(optimizer, model, "dear", fusion="tuned", first_mb=None)
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


def _rank_0_dies(step: int) -> str:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear", fusion="tuned")

    def after_step(*_: Any) -> None:
        if dear.rank() == 0 and len(seen) == step:
            os._exit(9)
        seen.append(1)

    seen: list[int] = []
    try:
        steps(model, optimizer, mine(), range(60), after_step=after_step)
    except RuntimeError as error:
        return str(error)
    return ""


def _silent(function: Any, *args: Any) -> str:
    """What `function` returned is told by a file, since the pool drops answers after a death."""
    said = function(*args)
    with open(os.environ["SAID"], "w") as file:
        file.write(said)
    return said


@pytest.mark.parametrize("step", [5, 8])
def test_the_death_of_rank_0_is_an_error_everywhere(step, tmp_path):
    from tests.ranks import RankError, RankPool

    paths = [tmp_path / f"said-{rank}" for rank in range(3)]
    pool = RankPool(3, backend="comm_core", environments=[{"SAID": str(path)} for path in paths])
    for pipe in pool.pipes.values():
        pipe.send((_silent, (_rank_0_dies, step)))
    for pipe, path in list(zip(pool.pipes.values(), paths, strict=True))[1:]:
        assert pipe.poll(60)
        pipe.recv()
        assert path.read_text() != ""
    with pytest.raises((RankError, OSError, EOFError)):
        if pool.pipes[0].poll(60):
            pool.pipes[0].recv()
    pool.close()


class Failing(Tuner):
    def propose(self) -> float:
        raise ValueError("no idea")


def _tuner_fails() -> str:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear", fusion="tuned")
    optimizer._engine._rule._tuner = Failing()
    try:
        steps(model, optimizer, mine(), range(8))
    except RuntimeError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


def test_a_tuner_that_fails_is_an_error_on_all_ranks(world):
    said = world(2).run(_tuner_fails)
    assert ["no idea" in text for text in said] == [True, True]
