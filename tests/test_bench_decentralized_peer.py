"""The bench beside decent-dp: its table, its mistakes, and a run of what is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.decentralized_peer import Case, _rendered

SCRIPT = Path(__file__).parents[1] / "bench" / "decentralized_peer.py"
SMALL = ["-n", "2", "--width", "8", "--layers", "2", "--steps", "2", "--repeats", "2"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_ratio_is_of_steps_per_second_round_by_round():
    case = Case(difference=2e-7)
    case.step_s = {"comm_core": [0.1, 0.2, 0.1], "gloo": [0.15, 0.2, 0.3]}
    assert (case.ratio.median, case.ratio.low, case.ratio.high) == (
        pytest.approx(1.5),
        pytest.approx(1.0),
        pytest.approx(3.0),
    )
    header, row, *_ = _rendered({"ring": case, "complete": Case()}).splitlines()
    assert header.split()[:2] == ["topology", "difference"]
    assert row.split()[:2] == ["ring", "2.0e-07"] and "1.50x" in row
    assert row.endswith("(1.00..3.00, 3 rounds)")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-n", "3", "--topologies", "ring"], "even number of ranks"),
        (["-n", "6", "--topologies", "one-peer-exp"], "2^k ranks"),
        (["--topologies", "rnig"], "did you mean 'ring'"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_mistakes_are_named_before_anything_starts(arguments, named):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and named in done.stderr


def test_ours_alone_is_timed_and_kept(tmp_path):
    path = tmp_path / "peer.json"
    alone = ["--engines", "comm_core", "--topologies", "ring", "complete", "--json", str(path)]
    done = run(*SMALL, *alone)
    assert done.returncode == 0, done.stderr
    kept = json.loads(path.read_text())
    assert [case["topology"] for case in kept["cases"]] == ["ring", "complete"]
    assert kept["parameters"] == 2 * (64 + 8)
    for case in kept["cases"]:
        assert len(case["step_s"]["dear"]) == 2 and min(case["step_s"]["dear"]) > 0
        assert case["step_s"]["decent-dp"] == [] and case["speedup"] is None
