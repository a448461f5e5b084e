"""The decentralized examples, started as users start them, by the curves that they write."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "decentralized"
sys.path.insert(0, str(FOLDER))

import logistic_regression  # noqa: E402

BIASED = ["averaging (awc)", "diffusion (atc)"]
EXACT = ["exact diffusion", "gradient tracking", "push-DIGing (directed)"]


def run(script: str, *flags: str, ranks: int) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), str(FOLDER / script), *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )


def curves(path: Path) -> dict[str, list[float]]:
    with path.open() as file:
        header, *rows = csv.reader(file)
    columns = [list(map(float, column)) for column in zip(*rows, strict=True)]
    assert columns[0] == list(range(len(rows)))
    return dict(zip(header[1:], columns[1:], strict=True))


def results(script: str, folder: Path, *flags: str) -> tuple[str, dict[str, list[float]]]:
    """What four ranks print, and their curves."""
    done = run(script, "--out", str(folder), *flags, ranks=4)
    assert done.returncode == 0, done.stderr
    stem = folder / Path(script).stem
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return done.stdout, curves(stem.with_suffix(".csv"))


@pytest.mark.full
def test_consensus_is_exact_and_as_fast_as_the_spectral_gap_says(tmp_path):
    said, found = results("consensus.py", tmp_path, "--iterations", "60")
    measured = {name: curve for name, curve in found.items() if "predicted" not in name}
    assert list(measured) == [
        *("ring", "star", "2-D mesh", "exponential", "fully connected", "one-peer exponential")
    ]
    for name, curve in measured.items():
        assert name in said
        assert curve[0] == 1 and curve[-1] < 1e-6
        for distance, bound in zip(curve, found.get(f"{name} (predicted)", []), strict=False):
            assert distance <= bound * (1 + 1e-6) + 1e-13
    assert measured["fully connected"][1] < 1e-12
    assert measured["one-peer exponential"][1] > 0.1
    assert measured["one-peer exponential"][2] < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("script", ["linear_regression.py", "logistic_regression.py"])
def test_corrected_methods_converge_linearly_and_plain_averaging_stalls(tmp_path, script):
    said, found = results(script, tmp_path)
    assert list(found) == BIASED + EXACT
    assert all(name in said for name in found)
    last = len(found[EXACT[0]]) - 1
    for name in BIASED:
        curve = found[name]
        assert curve[-1] > 1e-3
        assert curve[-1] == pytest.approx(curve[last * 3 // 4], rel=1e-3)  # it moves no more
    for name in EXACT:
        curve = found[name]
        assert curve[0] == pytest.approx(1)
        assert curve[-1] < 1e-8
        # Linearly: no part of the way is much slower than another.
        reached = next(k for k, distance in enumerate(curve) if distance < 1e-8)
        assert curve[reached // 2] < 1e-3


@pytest.mark.full
def test_alone_every_method_is_gradient_descent():
    done = run("linear_regression.py", "--iterations", "400", ranks=1)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert len(rows) == len(BIASED + EXACT)
    assert all(float(row[-1]) < 1e-8 for row in rows)


@pytest.mark.full
def test_a_mistake_is_one_line_and_status_2():
    done = run("consensus.py", ranks=1)
    assert done.returncode == 2
    assert "start several" in done.stderr and done.stderr.count("\n") == 1


def test_newton_finds_where_the_gradient_is_zero():
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    answers = torch.where(torch.rand(40, generator=generator) > 0.3, 1.0, -1.0).double()
    weights = logistic_regression.newton(features, answers).requires_grad_()
    loss = functional.softplus(-answers * (features @ weights)).mean()
    loss = loss + logistic_regression.PENALTY / 2 * weights.square().sum()
    loss.backward()
    assert weights.grad.norm() <= 1e-11
    assert weights.norm() > 0.1
