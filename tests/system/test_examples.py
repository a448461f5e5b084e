"""The examples, started as users start them: MNIST, and the decentralized methods."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import dear
from common.launch.ranks import Ranks, rank_env
from common.models.datasets.digits import load_digits
from common.models.datasets.mnist import load_mnist, read_idx
from dear.training.algorithm import algorithm_class, algorithm_names
from tests.system.made import idx, write_cifar, write_mnist
from tests.system.processes import finished

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "mnist" / "train.py"
TRAINING = ROOT / "examples" / "training" / "train.py"


def mnist_folder() -> Path:
    """MNIST's files: MNIST_DIR, or data/mnist in a folder `shared` beside the checkout."""
    folder = Path(os.environ.get("MNIST_DIR", ROOT.parent / "shared" / "data" / "mnist"))
    if not folder.is_dir():
        pytest.skip(f"no MNIST files in {folder} (set MNIST_DIR)")
    return folder


def last_accuracy(output: str) -> float:
    return float(re.findall(r"test accuracy ([0-9.]+)", output)[-1])


def run(*command: str, **options) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return finished(command, env=env, **options)


def train_in_ranks(folder: Path, *flags: str, script: Path = SCRIPT) -> str:
    """Runs a script's `main` in two ranks forked from a warm Python; returns what rank 0 says."""
    output = folder / "output"
    with Ranks() as ranks:
        for rank in range(2):
            env = rank_env(rank, 2, store=folder / "store")
            log = output if rank == 0 else folder / "other"
            ranks.function(_train, script, flags, env=env, log=log)
        ranks.wait(110)
    assert ranks.codes == {0: 0, 1: 0}, output.read_text()
    return output.read_text()


def _train(script: Path, flags: tuple[str, ...]) -> None:
    import torch

    sys.path.insert(0, str(script.parent))
    import train

    torch.set_num_threads(1)
    train.main(flags)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        pytest.param(
            *(("--amp", "bf16", "--warmup-epochs", "1", "--lr", "0.005"), "top-5 "),
            marks=pytest.mark.full,
        ),
        (("--data", "text", "--model", "lstm_small", "--lr", "1"), "perplexity "),
    ],
    ids=["cifar10", "text"],
)
def test_images_and_texts_are_trained_on_by_an_ordinary_script(tmp_path, flags, wanted):
    place = tmp_path / "data"
    if "text" in flags:
        place.write_text("one two three four five six seven\n" * 300)
    else:
        write_cifar(place)
    given = ("--data-dir", str(place), "--batch-size", "4", "--epochs", "3", *flags)
    output = train_in_ranks(tmp_path, *given, script=TRAINING)
    losses = [float(loss) for loss in re.findall(r"  loss ([0-9.]+)", output)]
    assert len(losses) == 3 and losses[2] < losses[0], output
    assert output.count(wanted) == 3 and "on 2 process(es), dear" in output


def bar(algorithm: str) -> float:
    # By default mgs sends a thousandth of each gradient, and the rest later. With dadt's gradients,
    # which are a step old, momentum 0.9 at this learning rate overshoots at first. Where nobody
    # waits it depends on the machine how old the neighbours' parameters are.
    asynchronous = algorithm_class(algorithm).capabilities.consistency == "asynchronous"
    return {"mgs": 0.9, "dadt": 0.9}.get(algorithm, 0.94 if asynchronous else 0.96)


@pytest.mark.parametrize(
    "algorithm",
    [
        name if name == "dear" else pytest.param(name, marks=pytest.mark.full)
        for name in algorithm_names()
    ],
)
def test_two_workers_learn_the_digits_in_3_epochs(tmp_path, algorithm):
    reason = algorithm_class(algorithm).unavailable()
    if reason:
        pytest.skip(reason)
    flags = ["--data-dir", str(mnist_folder()), "--epochs", "3", "--algorithm", algorithm]
    assert last_accuracy(train_in_ranks(tmp_path, *flags)) >= bar(algorithm)


@pytest.mark.full
def test_it_runs_under_torchrun():
    done = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(SCRIPT), "--epochs", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert "2 process(es), dear" in done.stdout


@pytest.mark.full
def test_it_runs_alone_and_offline_on_the_bundled_digits():
    done = run(sys.executable, str(SCRIPT), "--epochs", "4", "--lr", "0.05")
    assert done.returncode == 0, done.stderr
    assert last_accuracy(done.stdout) >= 0.9
    assert "1 process(es), dear" in done.stdout


@pytest.mark.full
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
def test_it_runs_under_mpirun():
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    done = run(
        *("mpirun", *root, "--oversubscribe", "-np", "2"),
        *(sys.executable, str(SCRIPT), "--epochs", "1", "--algorithm", "wfbp"),
    )
    assert done.returncode == 0, done.stderr
    assert "2 process(es), wfbp" in done.stdout


@pytest.mark.full
def test_the_shell_script_starts_as_many_workers_as_it_is_told():
    env = {**os.environ, "nworkers": "2", "method": "allreduce"}
    done = finished([str(ROOT / "mnist.sh"), "--epochs", "1"], env=env)
    assert done.returncode == 0, done.stderr
    assert "2 process(es), allreduce" in done.stdout
    assert "data: scikit-learn's 8x8 digits, 1618 images" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(["--algorithm", "deer"], "did you mean 'dear'?", marks=pytest.mark.full),
        (["--data-dir", "/nonexistent"], "no MNIST files"),
        pytest.param(["--batch-size", "0"], "from 1 to 1618, got 0", marks=pytest.mark.full),
        pytest.param(["--lr", "nan"], "must be at least 0", marks=pytest.mark.full),
    ],
)
def test_a_mistake_is_one_line_and_status_2(flags, words):
    done = run(sys.executable, str(SCRIPT), *flags)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_are_read_gzipped_or_not(tmp_path, zipped):
    write_mnist(tmp_path, zipped=zipped)
    (train_images, train_labels), (test_images, test_labels) = load_mnist(tmp_path)
    assert train_images.shape == (9, 1, 28, 28) and test_images.shape == (1, 1, 28, 28)
    assert sorted([*train_labels.tolist(), *test_labels.tolist()]) == list(range(10))


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"\x89PNG" + data])
def test_a_damaged_idx_file_is_refused(tmp_path, damage):
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(damage(idx(np.zeros((2, 28, 28)))))
    with pytest.raises(dear.UserError, match=str(path)):
        read_idx(path)


def test_the_bundled_digits_look_like_mnist():
    (images, labels), (test_images, _) = load_digits()
    assert images.shape[1:] == (1, 28, 28) and len(images) + len(test_images) == 1797
    assert set(labels.tolist()) == set(range(10))


FOLDER = ROOT / "examples" / "decentralized"
sys.path.insert(0, str(FOLDER))

import logistic_regression  # noqa: E402

BIASED = ["averaging (awc)", "diffusion (atc)"]
EXACT = ["exact diffusion", "gradient tracking", "push-DIGing (directed)"]


def run_ranks(script: str, *flags: str, ranks: int) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return finished(
        [sys.executable, *(launcher if ranks > 1 else []), str(FOLDER / script), *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def curves(path: Path) -> dict[str, list[float]]:
    with path.open() as file:
        header, *rows = csv.reader(file)
    columns = [list(map(float, column)) for column in zip(*rows, strict=True)]
    assert columns[0] == list(range(len(rows)))
    return dict(zip(header[1:], columns[1:], strict=True))


def results(script: str, folder: Path, *flags: str) -> tuple[str, dict[str, list[float]]]:
    """Returns what four ranks print, and their curves."""
    done = run_ranks(script, "--out", str(folder), *flags, ranks=4)
    assert done.returncode == 0, done.stderr
    stem = folder / Path(script).stem
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return done.stdout, curves(stem.with_suffix(".csv"))


@pytest.mark.full
def test_consensus_is_exact_and_as_fast_as_the_spectral_gap_says(tmp_path):
    output, curves = results("consensus.py", tmp_path, "--iterations", "60")
    measured = {name: curve for name, curve in curves.items() if "predicted" not in name}
    assert list(measured) == [
        *("ring", "star", "2-D mesh", "exponential", "fully connected", "one-peer exponential")
    ]
    for name, curve in measured.items():
        assert name in output
        assert curve[0] == 1 and curve[-1] < 1e-6
        for distance, bound in zip(curve, curves.get(f"{name} (predicted)", []), strict=False):
            assert distance <= bound * (1 + 1e-6) + 1e-13
    assert measured["fully connected"][1] < 1e-12
    assert measured["one-peer exponential"][1] > 0.1
    assert measured["one-peer exponential"][2] < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("script", ["linear_regression.py", "logistic_regression.py"])
def test_corrected_methods_converge_linearly_and_plain_averaging_stalls(tmp_path, script):
    output, curves = results(script, tmp_path)
    assert list(curves) == BIASED + EXACT
    assert all(name in output for name in curves)
    last = len(curves[EXACT[0]]) - 1
    for name in BIASED:
        curve = curves[name]
        assert curve[-1] > 1e-3
        assert curve[-1] == pytest.approx(curve[last * 3 // 4], rel=1e-3)  # it moves no more
    for name in EXACT:
        curve = curves[name]
        assert curve[0] == pytest.approx(1)
        assert curve[-1] < 1e-8
        # Linearly: no part of the way is much slower than another.
        reached = next(k for k, distance in enumerate(curve) if distance < 1e-8)
        assert curve[reached // 2] < 1e-3


@pytest.mark.full
def test_alone_every_method_is_gradient_descent():
    done = run_ranks("linear_regression.py", "--iterations", "400", ranks=1)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert len(rows) == len(BIASED + EXACT)
    assert all(float(row[-1]) < 1e-8 for row in rows)


@pytest.mark.full
def test_a_script_that_needs_others_says_so():
    done = run_ranks("consensus.py", ranks=1)
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
