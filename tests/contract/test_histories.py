"""Training computes what it computed when the fixtures were written; see `histories.py`."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest

import dear
from tests.contract.histories import (
    FOLDER,
    Case,
    all_cases,
    checkpoint_cases,
    checkpoint_files,
    compact,
    history,
    machine,
    unavailable,
)
from tests.contract.pairs import each_value_once, one_case


@functools.cache
def _recorded(subject: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{subject}.json").read_text())


def _params() -> list[Any]:
    """Quick ones hold every option, world, loop and optimizer of each subject."""
    params = []
    for subject, group in itertools.groupby(all_cases(), lambda case: case.subject):
        cases = list(group)
        quick = each_value_once([{**vars(case), "options": str(case.options)} for case in cases])
        for case, is_quick in zip(cases, quick, strict=True):
            params += one_case(case, label=f"{subject}: {case.name}", full=not is_quick)
    return params


@pytest.mark.parametrize("case", _params())
def test_history_is_what_it_was(world, case: Case):
    missing = unavailable(case.subject)
    if missing:
        pytest.skip(missing)
    _compare(compact(world(case.world, case.subject).run(history, case)), case)


@pytest.mark.parametrize("case", checkpoint_cases(), ids=lambda case: case.subject)
def test_a_checkpoint_of_then_goes_on_now(world, case: Case):
    missing = unavailable(case.subject)
    if missing:
        pytest.skip(missing)
    files = [path.read_bytes() for path in checkpoint_files(case)]
    assert files
    _compare(compact(world(case.world, case.subject).run(_go_on, case, files)), case)


def _go_on(case: Case, files: list[bytes]) -> dict[str, Any]:
    return history(case, files[dear.rank() % len(files)])


def _compare(got: list[dict[str, Any]], case: Case) -> None:
    """`got` may be the last steps only."""
    recorded = _recorded(case.subject)
    wanted = recorded["histories"][case.name]
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.get("refused") == theirs.get("refused")
        if "refused" in mine:
            continue
        if machine() == recorded["machine"]:
            assert theirs["steps"].endswith(mine["steps"])
            assert mine["end"] == theirs["end"]
        end = [float.fromhex(value) for value in theirs["end"]]
        assert [float.fromhex(value) for value in mine["end"]] == pytest.approx(end, 1e-6, 1e-7)
