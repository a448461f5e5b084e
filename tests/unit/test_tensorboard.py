"""Curves for TensorBoard: what is written for which step, and what is said without the package."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from common.harness import cli
from common.results import store, tensorboard
from common.results.records.learned import Evaluation, Learning, RankPace
from common.results.store import Comparison
from dear.errors import UserError
from tests.unit.made_record import record


def sweep(folder, records):
    folder.mkdir()
    for one in records:
        store.append(folder / "records.jsonl", one)
    Comparison(compare_to="ddp", trials=tuple(one.hash for one in records)).save(folder)
    return folder


def learned():
    evaluations = [
        Evaluation(at_s=0.0, seconds=0.0, steps=[0, 0], accuracy=0.1, loss=2.0),
        Evaluation(at_s=1.0, seconds=1.0, steps=[10, 13], accuracy=0.8, loss=0.5, train_loss=0.6),
    ]
    run = Learning(evaluations=evaluations, ranks=[RankPace(steps=10, samples=80, elapsed_s=1.0)])
    return dataclasses.replace(record("dear"), learning=[run, run], iters=[])


@pytest.fixture
def written(monkeypatch):
    """What a stand-in for the package's writer was given: (folder's name, tag, value, step)."""
    calls = []

    class SummaryWriter:
        def __init__(self, folder):
            self.name = folder.rpartition("/")[2]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            calls.append((self.name, "closed", None, None))

        def add_text(self, tag, text):
            calls.append((self.name, tag, text, None))

        def add_scalar(self, tag, value, step):
            calls.append((self.name, tag, value, step))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return calls


def test_steps_by_repeat_and_throughput(tmp_path, written):
    doubted = dataclasses.replace(record("dear"), notes=["disturbed: very"])
    trials = [record("ddp"), doubted, record("wfbp", status="failed")]
    assert tensorboard.write(tmp_path / "x", trials, tmp_path / "out") == 2
    first = [call[1:] for call in written if call[0] == trials[0].id]
    assert first[0] == ("trial", trials[0].id, None) and first[-1][0] == "closed"
    steps = trials[0].repeats[1]
    assert [call[1:] for call in first if call[0] == "step_s/repeat 1"] == [
        (seconds, number) for number, seconds in enumerate(steps)
    ]
    rates = [call[1:] for call in first if call[0] == "throughput"]
    assert rates == [(pytest.approx(160.0), repeat) for repeat in range(3)]
    (said,) = [call[2] for call in written if call[:2] == (doubted.id, "trial")]
    assert said.endswith("not believed: disturbed: very")


def test_what_was_learned_over_the_steps_of_a_rank(tmp_path, written):
    trial = learned()
    assert tensorboard.write(tmp_path / "x", [trial], tmp_path / "out") == 1
    by_tag = {}
    for _, tag, value, step in written:
        by_tag.setdefault(tag, []).append((value, step))
    assert by_tag["accuracy/run 1"] == [(0.1, 0), (0.8, 12)], "of 10 and 13 steps the mean"
    assert by_tag["train_loss/run 0"] == [(0.6, 12)] and by_tag["loss/run 0"][0] == (2.0, 0)
    assert by_tag["throughput"] == [(trial.throughput.value, 0)]


def test_what_is_there_already_is_not_mixed_with_it(tmp_path, written):
    (tmp_path / "out" / record("ddp").id).mkdir(parents=True)
    with pytest.raises(UserError, match="exists; name a new folder"):
        tensorboard.write(tmp_path, [record("ddp")], tmp_path / "out")
    with pytest.raises(UserError, match="no trial of x has a result"):
        tensorboard.write(tmp_path / "x", [record(status="oom")], tmp_path / "new")
    assert written == []


def test_without_the_package_a_line_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    folder = sweep(tmp_path / "x", [record("ddp")])
    assert cli.main(["show", str(folder), "--tensorboard", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.err.endswith("not installed: pip install tensorboard\n")
    assert said.out == "" and said.err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_the_package_reads_what_was_written(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trial, into = learned(), tmp_path / "out"
    folder = sweep(tmp_path / "x", [record("ddp"), trial])
    assert cli.main(["show", str(folder), "--tensorboard", str(into)]) == 0
    assert f"2 trials in {into}: tensorboard --logdir {into}" in capsys.readouterr().out
    read = EventAccumulator(str(into / record("ddp").id)).Reload()
    found = [one.value for one in read.Scalars("step_s/repeat 0")]
    assert found == pytest.approx(record("ddp").repeats[0])
    read = EventAccumulator(str(into / trial.id)).Reload()
    assert [one.step for one in read.Scalars("accuracy/run 0")] == [0, 12]
