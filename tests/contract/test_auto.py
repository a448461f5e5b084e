"""Algorithm `auto`: it trains serially before and after its choice, and all ranks choose alike."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import dear
from dear.algorithms.synchronous import auto
from dear.cost.fit import AlphaBeta
from dear.training import tuning
from dear.training.algorithm import algorithm_options
from tests.contract.loops import (
    difference,
    everybody,
    loss_of,
    make_model,
    make_sgd,
    message,
    mine,
    steps,
    wrap,
)

ENGINES = {
    "wfbp": "AveragingEngine",
    "mgwfbp": "MgWfbpEngine",
    "bytescheduler": "PartitionedEngine",
    "dear": "DearEngine",
}
PROFILED = 2


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Gives the lines that are logged about the choice."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("dear")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(before)


def _engine(optimizer: Any) -> str:
    return type(optimizer._engine).__name__


def _trained(candidates: list[str]) -> tuple[float, list[str], list[str]]:
    """Returns the largest difference from serial training, the engines by step, and the log."""
    model, wanted = make_model(), make_model()
    make = torch.optim.AdamW
    optimizer, serial = make(model.parameters(), 0.01), make(wanted.parameters(), 0.01)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in (optimizer, serial)]
    far, engines = 0.0, []
    with logged() as lines:
        wrap(optimizer, model, "auto", candidates=candidates, profile_steps=PROFILED)
        for step in range(10):
            # Two micro-batches, of which the first sends nothing.
            with optimizer.no_sync():
                optimizer.zero_grad()
                _half(model, mine(), 2 * step)
            _half(model, mine(), 2 * step + 1)
            optimizer.step()
            serial.zero_grad()
            _half(wanted, everybody(), 2 * step)
            _half(wanted, everybody(), 2 * step + 1)
            serial.step()
            for scheduler in schedulers:
                scheduler.step()
            far = max(far, difference(model, wanted))
            engines.append(_engine(optimizer))
            if step == PROFILED:  # just after the change
                state = optimizer.state_dict()
                optimizer.load_state_dict(state)
    optimizer.close()
    return far, engines, [line for line in lines if line.startswith("auto")]


def _half(model: torch.nn.Module, ranks: Any, step: int) -> None:
    losses = [loss_of(model, rank, step) for rank in ranks]
    (sum(losses) / len(losses) / 2).backward()


@pytest.mark.parametrize("size", [2, 3, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 4))])
@pytest.mark.parametrize("name", ENGINES)
def test_training_is_serial_before_and_after_the_choice(world, size, name):
    ranks = world(size).run(_trained, [name])
    assert max(far for far, _, _ in ranks) < 1e-5
    if size == 1:
        assert ranks == [(0.0, ["Engine"] * 10, [])]
        return
    before = ["AutoEngine"] * (PROFILED - 1)
    for place, (_, engines, lines) in enumerate(ranks):
        assert engines == before + [ENGINES[name]] * (10 - len(before))
        assert len(lines) == (place == 0), "it says once which and why"
    assert f"auto: continues with {name}" in ranks[0][2][0]
    assert f" ms {name}" in ranks[0][2][0] and "; without communication " in ranks[0][2][0]


def _chosen(steps_s: list[dict[str, float]], touch: bool = False) -> tuple[str, Any, float]:
    """Returns the engine, findings and difference, if ranks expect these steps."""
    model, wanted = make_model(), make_model()
    optimizer = wrap(make_sgd(model), model, "auto", profile_steps=PROFILED)
    serial = make_sgd(wanted)
    expected = steps_s[dear.rank()]

    def halved(*_: Any) -> None:
        for param in (*model.parameters(), *wanted.parameters()):
            if touch and param.grad is not None:
                param.grad.mul_(0.5)

    def foreseen(kind: Any, *_: Any) -> Any:
        return mock.Mock(step_s=expected[kind.__module__.rpartition(".")[2]])

    with mock.patch.object(auto, "foreseen", foreseen):
        for step in range(5):
            optimizer.zero_grad()
            serial.zero_grad()
            steps_of = [(model, mine()), (wanted, everybody())]
            for trained, ranks in steps_of:
                losses = [loss_of(trained, rank, step) for rank in ranks]
                (sum(losses) / len(losses)).backward()
            halved()
            optimizer.step()
            serial.step()
    result = _engine(optimizer), optimizer.findings()["auto"], difference(model, wanted)
    optimizer.close()
    return result


def test_rank_0_decides_for_all(world):
    rank_0 = {"wfbp": 4.0, "mgwfbp": 2.0, "bytescheduler": 3.0, "dear": 2.5}
    others = {**rank_0, "wfbp": 1.0}
    for engine, findings, far in world(3).run(_chosen, [rank_0, others, others]):
        assert (engine, findings["choice"]) == ("MgWfbpEngine", "mgwfbp"), "of equals, the first"
        names = [label.partition(" ")[0] for label in findings["expected"]]
        assert list(dict.fromkeys(names)) == ["mgwfbp", "dear", "bytescheduler", "wfbp"]
        assert findings["expected"]["dear fusion=planned"] == {"step_s": 2.5}
        assert far < 1e-5


def test_a_script_that_changes_gradients_without_synchronizing_stays_right(world):
    """`dear` and `bytescheduler` would refuse it in a later step."""
    steps_s = {"wfbp": 4.0, "mgwfbp": 5.0, "bytescheduler": 1.0, "dear": 1.0}
    for engine, _, far in world(2).run(_chosen, [steps_s] * 2, True):
        assert engine == "AveragingEngine" and far < 1e-5


def _clipped() -> float:
    """Returns the difference from MG-WFBP's clipping of each gradient, after a change to dear."""
    model, wanted = make_model(), make_model()
    optimizer, serial = make_sgd(model), make_sgd(wanted)
    options = {"candidates": ["dear"], "profile_steps": 1}
    wrap(optimizer, model, "auto", norm_clip=0.02, **options)
    wrap(serial, wanted, "allreduce", norm_clip=0.02)
    steps(model, optimizer, mine(), range(4))
    steps(wanted, serial, mine(), range(4))
    assert _engine(optimizer) == "DearEngine"
    optimizer.synchronize()
    far = difference(model, wanted)
    optimizer.close()
    serial.close()
    hooks = [param._post_accumulate_grad_hooks for param in model.parameters()]
    assert not any(hooks), "hooks are left"
    return far


def test_each_gradient_is_still_clipped_after_the_change(world):
    assert max(world(2).run(_clipped)) < 1e-6


def _paused() -> list[str]:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "auto", candidates=["dear"], profile_steps=1)
    engines = []
    optimizer.local = True
    for local in (True, False):
        optimizer.local = local
        steps(model, optimizer, mine(), [0])
        engines.append(_engine(optimizer))
    optimizer.close()
    return engines


def test_it_does_not_change_while_the_script_sends_nothing(world):
    assert world(2).run(_paused) == [["AutoEngine", "DearEngine"]] * 2


def _refused() -> list[str]:
    model = make_model()
    lbfgs = torch.optim.LBFGS(model.parameters())
    lines = [message(lambda: wrap(lbfgs, model, "auto", candidates=["dear", "bytescheduler"]))]
    optimizer = wrap(make_sgd(model), model, "auto", candidates=["dear"], profile_steps=1)

    def touched(optimizer: Any, model: torch.nn.Module) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    lines.append(message(lambda: steps(model, optimizer, mine(), [0], before_step=touched)))
    optimizer.close()
    return lines


def test_what_no_candidate_can_train_is_refused_in_one_line(world):
    for first, second in world(2).run(_refused):
        assert "none of dear, bytescheduler can train this model with this optimizer" in first
        assert "only after optimizer.synchronize(); call it before, or add wfbp" in second


def test_the_settling_steps_are_those_of_the_profile_and_of_the_slowest_candidate():
    options = algorithm_options("auto", {"profile_steps": 4})
    assert options.settling_steps() == 4 + tuning.WATCHED_STEPS
    alone = algorithm_options("auto", {"candidates": ["wfbp"], "compression": "bf16"})
    assert alone.settling_steps() == 5
    half = algorithm_options("wfbp", {"compression": "bf16"})
    assert alone.variants() == {"wfbp": ("wfbp", half)}


def _choice_at(alpha_s: float) -> str:
    """Returns the choice if a message costs so much."""
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "auto", candidates=["wfbp", "mgwfbp"])
    costs = AlphaBeta(alpha_s=alpha_s, beta_s_per_byte=1e-12)
    with mock.patch.object(tuning, "measured_costs", lambda *_: costs):
        steps(model, optimizer, mine(), range(5))
    chosen = optimizer.findings()["auto"]["choice"].partition(" ")[0]
    optimizer.close()
    return chosen


def test_it_merges_where_messages_have_long_start_ups(world):
    assert world(2).run(_choice_at, 10.0) == ["mgwfbp"] * 2
