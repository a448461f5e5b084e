"""Training computes what it computed when the fixtures were written; see `histories.py`."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.contract.histories import FOLDER, Case, all_cases, compact, history, machine, unavailable


@functools.cache
def _recorded(subject: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{subject}.json").read_text())


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: f"{case.subject}: {case.name}")
def test_history_is_what_it_was(world, bluefog_pool, case: Case):
    missing = unavailable(case.subject)
    if missing:
        pytest.skip(missing)
    on_machines = case.subject == "bluefog" and case.world == 4
    pool = bluefog_pool if on_machines else world(case.world)
    got = compact(pool.run(history, case))
    recorded = _recorded(case.subject)
    wanted = recorded["histories"][case.name]
    if machine() == recorded["machine"]:
        assert got == wanted
        return
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.get("refused") == theirs.get("refused")
        end = [float.fromhex(value) for value in theirs.get("end", [])]
        assert [float.fromhex(v) for v in mine.get("end", [])] == pytest.approx(end, rel=1e-6)
