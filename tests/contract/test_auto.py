"""Algorithm `auto`: it trains serially before and after its choice, and ranks choose alike."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.contract.loops import difference, everybody, make_model, mine, steps, wrap


def _trained(candidates: list[str], size: int = 0) -> tuple[float, str, list[str]]:
    model, wanted = make_model(), make_model()
    make = torch.optim.AdamW
    optimizer, serial = make(model.parameters(), 0.01), make(wanted.parameters(), 0.01)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dear").addHandler(handler)
    logging.getLogger("dear").setLevel(logging.INFO)
    wrap(optimizer, model, "auto", candidates=candidates, profile_steps=2)
    far = 0.0
    for step in range(10):
        steps(model, optimizer, mine(), [step])
        steps(wanted, serial, everybody(), [step])
        far = max(far, difference(model, wanted))
    kind = type(optimizer._engine).__name__
    optimizer.close()
    logging.getLogger("dear").removeHandler(handler)
    return far, kind, [line for line in lines if line.startswith("auto")]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["wfbp", "mgwfbp", "bytescheduler", "dear"])
def test_training_is_serial_before_and_after_the_choice(world, size, name):
    ranks = world(size).run(_trained, [name])
    assert max(far for far, _, _ in ranks) < 1e-5
    print(ranks)
