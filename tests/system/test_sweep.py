"""Sweeps by how their trials end: through the command line, on a made-up fabric."""

from __future__ import annotations

import csv
import dataclasses
import errno
import fcntl
import gc
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from common import machine
from common.emulation import sandbox
from common.emulation.dilation import Choice
from common.harness import cli
from common.harness.running import fabric, sweep, used
from common.harness.running.fabric import Fabric
from common.harness.running.sweep import cost_place
from common.harness.trial import Briefing, Trial
from common.launch.job import Job, Outcome
from common.results import store
from common.results.records import FabricFacts, Record, Result
from common.results.records.trust import Check, CostCheck, Note, Strain
from common.results.validity import flag, flag_text
from dear.cost.fit import CollectiveCost
from dear.training.algorithm import algorithm_class
from tests.system.made import make_trial

TWO_CELLS = """
algorithms: [ddp, dear]
models: [{name: mnist_cnn, batch_size: 2}, {name: mnist_cnn, batch_size: 4}]
world_sizes: [2]
baseline: false
measure: {repeats: 2}
"""
COSTS = {"all_reduce": CollectiveCost(alpha_s=0.01, beta_s_per_byte=1e-9)}
GOOD = Result(
    iters=[[0.5, 0.5]],
    cpu_s_per_s=1.0,
    loss=1.0,
    check=Check(replicas_agree=True, matches_reference=True, replica_spread=0.0),
    costs=COSTS,
)
TOO_SLOW = Outcome(
    status="timeout",
    error={"kind": "timeout", "message": "too slow", "rank": None, "where": None},
)


def ended_well(result: Result = GOOD) -> Outcome:
    """Returns an outcome as a launcher does: the result has been through a file."""
    return Outcome(status="ok", result=json.loads(json.dumps(dataclasses.asdict(result))))


class StubFabric(Fabric):
    """Jobs end well, unless their algorithm is one of `outcomes` or the network carries nothing."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.broken_cells = 0
        self.interrupted_launch: int | None = None
        self.settled: list[Choice | None] = []
        self.scale = 1.0
        self.started: list[str] = []
        self.entered: list[set[tuple[int, bool]]] = []
        self.briefings: list[Briefing] = []

    def enter_cell(self, trials: Sequence[Trial], settled: Choice | None = None) -> None:
        self.settled.append(settled)
        self.entered.append({(trial.world_size, trial.fault is not None) for trial in trials})
        self.broken_cells -= 1
        if self.broken_cells >= 0:
            raise RuntimeError("the link of h1 carries no data: timed out")

    def describe(self, trial: Trial) -> FabricFacts:
        reason = self.settled[-1].reason if self.settled[-1] else "12 CPU seconds a step"
        return FabricFacts(kind="emulated", time_scale=self.scale, time_scale_reason=reason)

    def run(self, trial: Trial, job: Job) -> Outcome:
        self.started.append(trial.title)
        self.briefings.append(Briefing.load(job.folder))
        if len(self.started) == self.interrupted_launch:
            raise KeyboardInterrupt
        return self.outcomes.get(trial.algorithm, ended_well())


class Line:
    """`benchmarks.py run` in this process."""

    def __init__(self, folder: Path, stub: StubFabric) -> None:
        self._experiment = folder / "tiny.yaml"
        self._experiment.write_text(TWO_CELLS)
        self.fabric = stub
        self.logs = folder / "logs"
        self.sweep = self.logs / "tiny"

    def run(self, *flags: str) -> int:
        self.fabric.started.clear()
        command = ["run", str(self._experiment), "--logs", str(self.logs), "--no-plot", *flags]
        return cli.main(command)

    @property
    def records(self) -> list[Record]:
        return store.load(self.sweep / "records.jsonl")


@pytest.fixture
def line(tmp_path, monkeypatch):
    stub = StubFabric()
    monkeypatch.setattr(fabric, "make_fabric", lambda experiment, trials: stub)
    return Line(tmp_path, stub)


ONE_CELL = ("-k", "bs=2")


def test_repeats_of_compared_trials_take_turns(line):
    assert line.run(*ONE_CELL) == 0
    names = [title.split()[-1] for title in line.fabric.started]
    assert [sorted(names[:2]), sorted(names[2:])] == [["ddp", "dear"]] * 2
    first, second = line.records
    assert first.run == second.run


def test_a_second_run_runs_nothing_unless_it_is_told_to(line, capsys, monkeypatch):
    assert line.run(*ONE_CELL) == 0
    capsys.readouterr()
    assert line.run(*ONE_CELL) == 0
    assert line.fabric.started == [] and len(line.records) == 2
    assert "[1/" not in capsys.readouterr().err
    monkeypatch.setattr(sweep, "now", lambda: "much later")
    assert line.run(*ONE_CELL, "-k", "dear", "--rerun", "all") == 0
    assert [record.label for record in line.records[2:]] == ["dear"]
    # The table still compares everything.
    out = capsys.readouterr().out
    assert "not measured in turn with ddp" in out and "ddp " in out


def test_every_run_leaves_its_command_and_its_experiment(line, capsys):
    flags = (*ONE_CELL, "--set", "name=tiny")
    assert line.run(*flags) == 0
    assert line.run(*flags) == 0, "it had nothing to do, and so has made nothing"
    (run,) = store.runs(line.sweep)
    assert {record.run for record in line.records} == {run.run}
    assert run.experiment == TWO_CELLS
    assert run.command.startswith("python benchmarks.py run ")
    assert run.command.endswith("--no-plot -k bs=2 --set name=tiny")
    assert "python benchmarks.py report tiny --logs" in capsys.readouterr().out
    assert line.run(*flags, "--rerun", "all") == 0
    assert len(store.runs(line.sweep)) == 2


def test_a_failed_trial_is_named_and_it_alone_is_run_again(line, capsys):
    line.fabric.outcomes["ddp"] = TOO_SLOW
    assert line.run(*ONE_CELL) == 1
    by_name = {record.label: record for record in line.records}
    assert (by_name["ddp"].status, by_name["dear"].status) == ("timeout", "ok")
    assert by_name["ddp"].error.message == "too slow"
    out = capsys.readouterr().out
    assert "too slow" in out and "no log here: it never started" in out
    line.fabric.outcomes.clear()
    assert line.run(*ONE_CELL) == 0
    assert [record.label for record in line.records[2:]] == ["ddp"]


def test_trials_that_are_run_later_have_the_time_scale_of_those_on_record(line):
    line.fabric.scale, line.fabric.outcomes["ddp"] = 12.0, TOO_SLOW
    assert line.run(*ONE_CELL) == 1
    line.fabric.outcomes.clear()
    assert line.run() == 0
    first, again, other_cell = line.fabric.settled
    assert first is None and other_cell is None
    assert again.time_scale == 12.0
    assert again.reason == "as others of the cell, which are on record: 12 CPU seconds a step"
    line.fabric.settled.clear()
    assert line.run(*ONE_CELL, "-k", "dear", "--rerun", "all") == 0
    assert [choice.reason for choice in line.fabric.settled] == [again.reason], "said once"
    line.fabric.settled.clear()
    assert line.run(*ONE_CELL, "--rerun", "all") == 0
    assert line.fabric.settled == [None], "nothing of the cell stays"


def test_a_fault_has_the_time_scale_of_what_it_is_compared_with(line, monkeypatch):
    monkeypatch.setattr(sandbox, "inside", lambda: True)
    line.fabric.scale = 12.0
    fault = "faults=[{kind: kill_rank, rank: 1, at_s: 1}]"
    cluster = ["--set", "cluster={hosts: 2}", "--set", fault]
    assert line.run(*ONE_CELL, *cluster) == 0
    undisturbed, faulty = line.fabric.settled
    assert undisturbed is None and faulty.time_scale == 12.0


def test_worlds_of_a_cell_are_prepared_for_together_and_later_ones_anew(line, monkeypatch):
    """Scales that are right for the smallest of several worlds are too fast for the others."""
    monkeypatch.setattr(sandbox, "inside", lambda: True)
    fault = "faults=[{kind: kill_rank, rank: 1, at_s: 1}]"
    worlds = ["--set", "cluster={hosts: 3}", "--set", "world_sizes=[2, 3]", "--set", fault]
    small = [flag.replace("[2, 3]", "[2]") for flag in worlds]
    assert line.run(*ONE_CELL, *worlds) == 0
    assert line.fabric.entered == [{(2, False), (3, False)}, {(2, True), (3, True)}]

    line.fabric.settled.clear(), line.fabric.entered.clear()
    assert line.run(*ONE_CELL, *small, "--rerun", "all") == 0
    assert line.fabric.entered == [{(2, False)}, {(2, True)}]
    line.fabric.settled.clear(), line.fabric.entered.clear()
    (line.sweep / "records.jsonl").write_text("")
    assert line.run(*ONE_CELL, *small) == 0
    line.fabric.scale = 12.0
    assert line.run(*ONE_CELL, *worlds) == 0
    assert line.fabric.entered[2:] == [{(3, False)}, {(3, True)}]
    calm, faulty = line.fabric.settled[2:]
    assert calm is None and faulty.time_scale == 12.0


def test_a_record_tells_the_order_of_its_cell_and_a_dry_run_how_long_it_goes_on(line, capsys):
    assert line.run(*ONE_CELL) == 0
    ddp, dear = line.records
    assert ddp.order.seed == dear.order.seed
    pairs = zip(ddp.order.positions, dear.order.positions, strict=True)
    assert [sorted(pair) for pair in pairs] == [[0, 1], [0, 1]]
    capsys.readouterr()
    ranged = ("--set", "measure.repeats=[5, 12]", "--set", "measure.precision=0.02")
    assert line.run(*ONE_CELL, "--dry-run", *ranged) == 0
    assert "5 to 12 repeats, until the interval is +-2 % of its value" in capsys.readouterr().out


def test_an_interrupted_trial_and_those_under_way_are_recorded(line, capsys):
    line.fabric.interrupted_launch = 2
    assert line.run(*ONE_CELL) == 130
    assert "interrupted; finished trials are recorded" in capsys.readouterr().err
    assert {(record.label, record.status) for record in line.records} == {
        ("ddp", "interrupted"),  # one of them had a repeat
        ("dear", "interrupted"),
    }


def test_a_stopped_sweep_shows_the_rounds_that_it_has(line, capsys):
    line.fabric.interrupted_launch = 4
    assert line.run(*ONE_CELL, "--set", "measure.repeats=3") == 130
    printed = capsys.readouterr().out
    for label, repeats in (("ddp", 2), ("dear", 1)):
        (row,) = re.findall(rf".*2 │ {label} .*", printed)
        assert f"{repeats} x 2" in row and "(8.00 img/s)" in row, row
        assert f"provisional, repeats so far: {repeats} (Ctrl-C" in row, row
        assert ("(8.00-8.00)" in row) == (repeats > 1), row
    assert not re.search("FASTER|SLOWER|SAME|UNSURE|highest throughput|log:", printed)
    line.fabric.interrupted_launch = None
    assert line.run(*ONE_CELL, "--set", "measure.repeats=3") == 0
    assert "provisional" not in capsys.readouterr().out


def test_a_sweep_that_was_stopped_goes_on_where_it_was(line):
    line.fabric.interrupted_launch = 4
    assert line.run(*ONE_CELL, "--set", "measure.repeats=3") == 130
    first = {record.run for record in line.records}
    (line.sweep / ".underway-1.json.7.partial").touch()  # as SIGKILL may leave one
    marks = [path.parent / "mark" for path in line.sweep.glob("*/trial.json")]
    for mark in marks:
        mark.touch()
    line.fabric.interrupted_launch = None
    assert line.run(*ONE_CELL, "--set", "measure.repeats=3") == 0
    assert len(line.fabric.started) == 3, "of 6 launches 3 had ended"
    newest = list(store.latest(line.records).values())
    assert {record.status for record in newest} == {"ok"}
    assert {record.run for record in newest} == first, "one run: they have taken turns"
    assert {len(record.iters) for record in newest} == {3}
    assert all(mark.exists() for mark in marks), "files of earlier repeats stay"
    assert all(briefing.costs for briefing in line.fabric.briefings[1:]), (
        "measured once for both runs"
    )
    assert not list(line.sweep.glob("*underway*")), "nothing is left of it"


THREE = ("--set", "measure.repeats=3")


def newest(line):
    return {record.label: record for record in store.latest(line.records).values()}


def test_a_filtered_run_leaves_the_repeats_of_the_others(line):
    line.fabric.interrupted_launch = 5
    assert line.run(*ONE_CELL, *THREE) == 130
    line.fabric.interrupted_launch = None
    assert line.run(*ONE_CELL, *THREE, "-k", "dear") == 0
    assert len(line.fabric.started) == 1
    assert line.run(*ONE_CELL, *THREE) == 0
    assert len(line.fabric.started) == 1
    assert {len(record.results) for record in newest(line).values()} == {3}
    assert not list(line.sweep.glob("underway*"))


def test_what_rerun_all_discards_does_not_come_back(line):
    line.fabric.interrupted_launch = 5
    assert line.run(*ONE_CELL, *THREE) == 130
    line.fabric.interrupted_launch = 1
    assert line.run(*ONE_CELL, *THREE, "--rerun", "all", "-k", "dear") == 130
    line.fabric.interrupted_launch = None
    assert line.run(*ONE_CELL, *THREE) == 0
    assert sorted(labels(line)) == ["ddp"] + ["dear"] * 3


def test_a_record_has_repeats_of_one_time_scale(line, capsys):
    """`--rerun all` may choose another scale, and end before all trials have it."""
    flags = (*ONE_CELL, *THREE, "--set", "algorithms=[ddp, dear, wfbp]")
    line.fabric.scale = 4.0
    assert line.run(*flags) == 0
    line.fabric.scale, line.fabric.interrupted_launch = 8.0, 2
    assert line.run(*flags, "--rerun", "all") == 130
    line.fabric.scale, line.fabric.interrupted_launch = 4.0, None
    capsys.readouterr()
    assert line.run(*flags) == 0
    assert line.fabric.settled[-1].time_scale == 4.0 and len(line.fabric.started) == 6
    text = "its repeats so far: they have time scale 8, and the cell has 4"
    assert capsys.readouterr().err.count(text) == 1
    notes = [note.text for record in newest(line).values() for note in record.notes]
    assert sum(text in note for note in notes) == 1


def test_labels_are_those_of_the_experiment_and_not_of_old_records(line, capsys):
    def named(first: str, second: str) -> tuple[str, str]:
        both = f"{{name: ddp, label: {first}}}, {{name: dear, label: {second}}}"
        return "--set", f"algorithms=[{both}]"

    slow = dataclasses.replace(GOOD, iters=[[1.0, 1.0]])
    line.fabric.outcomes["dear"] = ended_well(slow)
    assert line.run(*ONE_CELL, *named("a", "b")) == 0
    capsys.readouterr()
    assert line.run(*ONE_CELL, *named("b", "a"), "--json", "--set", "compare_to=a") == 0
    shown = {
        r["trial"]["label"]: r["trial"]["algorithm"] for r in json.loads(capsys.readouterr()[0])
    }
    assert line.fabric.started == [] and shown == {"b": "ddp", "a": "dear"}
    rows = (line.sweep / "table.csv").read_text().splitlines()
    speedups = {row["algorithm"]: row["speedup"] for row in csv.DictReader(rows)}
    assert {label: float(value or 1) for label, value in speedups.items()} == {"a": 1, "b": 2}


def test_other_hosts_are_other_trials(line, tmp_path, capsys):
    hosts = tmp_path / "hosts"
    flags = (*ONE_CELL, "--set", "launcher=ssh", "--set", f"hostfile={hosts}")
    hosts.write_text("h1\nh2\n")
    assert line.run(*flags) == 0
    hosts.write_text("# the same\nh1 slots=1\nh2\n")
    assert line.run(*flags) == 0 and line.fabric.started == []
    hosts.write_text("h1\nh3\n")
    capsys.readouterr()
    assert line.run(*flags) == 0 and len(line.fabric.started) == 4
    assert "are not used, because of changes: hosts_digest (" in capsys.readouterr().err


class Gone(io.StringIO):
    """The pipe of a reader that has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_sweep_does_not_end_with_the_reader_of_its_progress(line, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Gone())
    line.fabric.interrupted_launch = 2
    line.run(*ONE_CELL)
    line.fabric.interrupted_launch = None
    assert line.run(*ONE_CELL) == 0
    assert [record.status for record in newest(line).values()] == ["ok", "ok"]


@pytest.mark.parametrize(("words", "status"), [((), 130), (("--dry-run",), 0)])
def test_a_reader_that_ends_interrupts_what_does_more_than_print(line, monkeypatch, words, status):
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w", buffering=1, encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", io.StringIO())  # is closed
        assert line.run(*ONE_CELL, *words) == status


BOTH = {"ddp", "dear"}
SYNCHRONOUS = "dear/algorithms/synchronous"


@pytest.mark.parametrize(
    ("kind", "name", "begun_again"),
    [
        ("file", "dear/optimizer.py", BOTH),
        ("file", f"{SYNCHRONOUS}/dear.py", {"dear"}),
        ("file", f"{SYNCHRONOUS}/mgwfbp.py", set()),
        ("file", "dear/algorithms/planning.py", BOTH),
        ("file", "dear/algorithms/reference.py", BOTH),
        ("file", "common/models/architectures/lstm.py", set()),
        ("package", "torch", BOTH),
        ("package", "horovod", set()),
        ("variable", "OMP_NUM_THREADS", BOTH),
        ("variable", "HOROVOD_CYCLE_TIME", set()),
        ("variable", "NCCL_ALGO", set()),
        ("variable", "DEAR_SANDBOX", set()),
    ],
)
def test_a_stopped_trial_begins_again_if_what_it_uses_has_changed(
    line, monkeypatch, capsys, kind, name, begun_again
):
    line.fabric.interrupted_launch = 4
    assert line.run(*ONE_CELL) == 130
    line.fabric.interrupted_launch = None
    if kind == "file":
        assert name in used.code()
        monkeypatch.setitem(used.code(), name, "# another")
    elif kind == "package":
        version = machine.version
        monkeypatch.setattr(machine, "version", lambda p: "0.1" if p == name else version(p))
    else:
        monkeypatch.setenv(name, "7")
    monkeypatch.setattr(machine, "_commit", lambda: "another")  # of texts, say
    capsys.readouterr()
    assert line.run(*ONE_CELL) == 0
    warning = capsys.readouterr().err
    for label, record in zip(("ddp", "dear"), store.latest(line.records).values(), strict=True):
        words = f"{label}: begins again, because of changes since it stopped: "
        assert (words in warning) == (label in begun_again), warning
        notes = " ".join(note.text for note in record.notes)
        assert ("begins again" in notes) == (label in begun_again), notes
        assert record.label == label and len(record.iters) == 2
    assert (f"{kind} {name} (" in warning) == (bool(begun_again) and kind != "file")


@pytest.mark.parametrize(
    ("trial", "file"),
    [
        (make_trial("auto"), f"{SYNCHRONOUS}/dear.py"),
        (make_trial("auto"), f"{SYNCHRONOUS}/mgwfbp.py"),
        (make_trial("ddp", model="resnet20"), "common/models/architectures/cnn.py"),
    ],
)
def test_changes_are_seen_of_what_a_trial_uses_through_others(monkeypatch, trial, file):
    card = machine.machine_card()
    before = used.used(trial, card)
    monkeypatch.setitem(used.code(), file, used.code()[file] + "# another")
    (changed,) = used.changes(before, used.used(trial, card))
    assert changed == file or changed.startswith("code (")


def test_changed_settings_that_need_new_measurements_are_named(line, capsys):
    assert line.run(*ONE_CELL, "--set", "measure.repeats=1") == 0
    assert line.run(*ONE_CELL, "--set", "measure.repeats=1", "--set", "timeout_s=99") == 0
    assert line.fabric.started == [] and "are not used" not in capsys.readouterr().err
    assert line.run(*ONE_CELL, "--set", "measure.repeats=2") == 0
    words = "earlier results of 2 trials are not used, because of changes: measure.repeats (1 befo"
    assert words in capsys.readouterr().err


def test_a_long_sweep_does_not_keep_its_records(line, monkeypatch):
    alive = []

    def run(trial: Trial, job: Job) -> Outcome:
        alive.append(sum(isinstance(thing, Record) for thing in gc.get_objects()))
        return ended_well()

    monkeypatch.setattr(line.fabric, "run", run)
    models = ", ".join(f"{{name: mnist_cnn, batch_size: {batch}}}" for batch in range(1, 9))
    flags = ("--set", f"models=[{models}]", "--set", "measure.repeats=1", "--rerun", "all")
    store._loaded.cache_clear()
    assert line.run(*flags) == 0
    gc.collect()
    before = sum(isinstance(thing, Record) for thing in gc.get_objects())
    alive.clear()
    assert line.run(*flags) == 0
    assert len(alive) == 16 and max(alive) <= before + 2, "of each cell, and not of all cells"


@pytest.mark.parametrize("changed", [False, True])
def test_repeats_at_twice_the_scale_are_made_up_for_unless_something_has_changed(
    line, capsys, monkeypatch, changed
):
    model = "models=[{name: mnist_cnn@rtx2080ti-modelled, batch_size: 32}]"
    flags = [f"--set={key}" for key in (model, "cluster={hosts: 2}", "measure.repeats_at_2k=1")]
    monkeypatch.setattr(sandbox, "inside", lambda: True)
    monkeypatch.setattr(line.fabric, "slow_down", lambda choice: None)
    line.fabric.interrupted_launch = 6  # the second launch at twice the scale
    assert line.run(*flags) == 130
    assert [record.status for record in newest(line).values()] == ["ok", "ok"]
    before = line.records
    line.fabric.interrupted_launch = None
    if changed:
        monkeypatch.setattr(sweep, "changes", lambda *_: ["libc"])
    capsys.readouterr()
    assert line.run(*flags) == 0
    words = "stays without repeats at twice the time scale (changes since it stopped: libc)"
    if changed:
        assert words in capsys.readouterr().err and line.records == before
        assert line.run(*flags) == 0 and words not in capsys.readouterr().err, "said once"
    else:
        assert len(line.fabric.started) == 1
        assert all(record.systematic for record in newest(line).values())


def test_all_that_is_to_run_again_begins_again(line):
    line.fabric.interrupted_launch = 4
    assert line.run(*ONE_CELL) == 130
    line.fabric.interrupted_launch = None
    assert line.run(*ONE_CELL, "--rerun", "all") == 0
    assert len(line.fabric.started) == 4


def test_a_full_disk_is_one_line_and_costs_no_finished_repeat(line, monkeypatch, capsys):
    """`write` names no file; before the first launch the disk is asked for room."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = (
        "No space left on device; make room and run the command again: finished trials are kept\n"
    )
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert line.run(*ONE_CELL) == 2
        assert line.fabric.started == []
        assert capsys.readouterr().err == f"error: {line.sweep}: {words}"
    with monkeypatch.context() as patched:
        patched.setattr(store, "append", full)
        patched.setattr(os, "posix_fallocate", lambda *_: line.fabric.started and full())
        assert line.run(*ONE_CELL) == 2
    assert capsys.readouterr().err.endswith(f"error: {line.logs}: {words}")
    assert line.run(*ONE_CELL) == 0
    assert line.fabric.started == [], "all 4 launches had ended; what they gave was kept"
    assert [record.status for record in line.records] == ["ok", "ok"]


def test_the_table_holds_the_current_experiment_only(line, capsys):
    assert line.run("-k", "bs=2 n=2 dear", "--set", "measure.repeats=1") == 0
    assert line.run("-k", "bs=2 n=2 dear") == 0
    assert len(line.records) == 2
    assert (line.sweep / "table.md").read_text().count("\n") == 3
    capsys.readouterr()
    assert cli.main(["show", "tiny", "--json", "--logs", str(line.logs)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [record["hash"] for record in shown] == [line.records[1].hash]


def test_json_prints_the_records_and_nothing_else(line, capsys):
    assert line.run("--json", "-k", "none", "-k", "bs=2") == 2  # no title holds "none"
    capsys.readouterr()
    assert line.run("--json", *ONE_CELL) == 0
    printed = json.loads(capsys.readouterr().out)
    kept = [store.latest(line.records)[record["hash"]].to_json() for record in printed]
    assert printed == json.loads(json.dumps(kept))
    assert [record["trial"]["label"] for record in printed] == ["ddp", "dear"]


def test_an_unavailable_algorithm_is_recorded_with_its_reason(line, monkeypatch, capsys):
    missing = classmethod(lambda cls: "not there; make it")
    monkeypatch.setattr(algorithm_class("dear"), "unavailable", missing)
    assert line.run(*ONE_CELL, "-k", "dear") == 1  # nothing was measured
    assert line.run(*ONE_CELL) == 0  # not a failure, but said
    by_name = {record.label: record for record in line.records}
    assert by_name["dear"].status == "unsupported" and by_name["ddp"].ok
    assert by_name["dear"].error.message == "not there; make it"
    assert "not there; make it" in capsys.readouterr().out


def test_a_sweep_without_a_record_has_no_answer(line, capsys):
    line.sweep.mkdir(parents=True)
    (line.sweep / "records.jsonl").touch()
    store.Comparison(compare_to="ddp", trials=("a",)).save(line.sweep)
    assert cli.main(["show", "tiny", "--logs", str(line.logs)]) == 0
    assert "No answer yet: no trial has ended." in capsys.readouterr().out


def test_two_runs_of_one_sweep_do_not_mix(line, capsys):
    line.sweep.mkdir(parents=True)
    with (line.sweep / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert line.run() == 2
        assert "another run" in capsys.readouterr().err
        assert line.fabric.started == []
    assert line.run(*ONE_CELL) == 0


def test_training_that_diverges_is_marked_and_the_sweep_goes_on(line, capsys):
    check = Check(replicas_agree=False, matches_reference=False, replica_spread=math.inf)
    wild = dataclasses.replace(GOOD, loss=math.nan, check=check)
    line.fabric.outcomes["ddp"] = ended_well(wild)
    assert line.run(*ONE_CELL) == 1
    ddp, dear = sorted(line.records, key=lambda record: record.label != "ddp")
    assert ddp.ok and ddp.first.loss is None and ddp.check.replica_spread is None
    assert ddp.check.replicas_agree is False and ddp.notes[0].kind == "diverged"
    assert dear.check.matches_reference
    out = capsys.readouterr().out
    assert "diverged" in out and "NO" in out


def test_a_loss_that_is_not_a_number_marks_a_trial_whose_replicas_agree(line):
    line.fabric.outcomes["ddp"] = ended_well(dataclasses.replace(GOOD, loss=math.nan))
    assert line.run(*ONE_CELL) == 0
    texts = {record.label: flag_text(record) for record in line.records}
    assert texts["ddp"] == "diverged: the loss is not finite; lower optimizer.lr"
    assert texts["dear"] is None


def test_what_was_not_the_right_training_has_no_word_and_the_exit_status_is_1(line, capsys):
    wrong = Check(replicas_agree=True, matches_reference=False, finding="nothing was exchanged")
    fast = dataclasses.replace(GOOD, iters=[[0.01, 0.01]], check=wrong)
    line.fabric.outcomes["dear"] = ended_well(fast)
    repeats = ("--set", "measure.repeats=3")
    assert line.run(*ONE_CELL, *repeats) == 1
    out = capsys.readouterr().out
    assert "FASTER" not in out and "NO" in out and "(400 img/s)" in out
    dear = next(record for record in line.records if record.label == "dear")
    assert f"trained incorrectly: {dear.id} (incorrect: nothing was exchanged)" in out
    assert len(dear.iters) == 1, "more repeats of it would tell nothing"
    # It is measured again, alone, and is not asked of others; showing is not running.
    assert line.run(*ONE_CELL, *repeats) == 1
    assert [title.split()[-1] for title in line.fabric.started] == ["dear"]
    assert line.run(*ONE_CELL, *repeats, "-k", "ddp") == 0
    assert cli.main(["show", "tiny", "--logs", str(line.logs)]) == 0
    # What nobody has compared is no mistake, but no result either.
    line.fabric.outcomes["dear"] = ended_well(dataclasses.replace(GOOD, check=Check()))
    assert line.run(*ONE_CELL, *repeats, "--rerun", "all") == 0
    assert "unchecked" in capsys.readouterr().out


def test_a_cell_whose_network_fails_is_recorded_and_the_sweep_goes_on(line):
    line.fabric.broken_cells = 1
    assert line.run() == 1
    failed = [record for record in line.records if record.status == "failed"]
    assert [record.trial["batch_size"] for record in failed] == [2, 2]
    for record in failed:
        assert "h1 carries no data" in record.error.message
    assert len(line.fabric.started) == 4
    assert all("bs=4" in title for title in line.fabric.started)


def test_fail_fast_ends_the_sweep_there(line):
    line.fabric.broken_cells = 1
    assert line.run("--fail-fast") == 1
    assert [record.status for record in line.records] == ["failed", "failed"]
    assert line.fabric.started == []


def test_what_one_trial_has_measured_of_collectives_the_others_of_its_model_are_told(line):
    assert line.run() == 0
    assert [record.first.costs for record in line.records] == [COSTS] * 4
    # Both models differ in batch size only.
    assert [briefing.costs for briefing in line.fabric.briefings] == [None, *[COSTS] * 7]


def test_doubtful_costs_are_told_of_every_trial_that_used_them(line):
    moved = CostCheck(residual=0.01, noise=0.0, drift=0.5)
    checks = itertools.chain([moved], itertools.repeat(None))
    line.fabric.run = lambda trial, job: ended_well(
        dataclasses.replace(GOOD, cost_check=next(checks))
    )
    assert line.run(*ONE_CELL) == 0
    assert [record.first.cost_check for record in line.records] == [moved] * 2
    doubtful = "costs of collectives are doubtful: they changed by +50% during the trial"
    assert [[note.text for note in record.notes] for record in line.records] == [[doubtful]] * 2
    assert [flag_text(record) for record in line.records] == [None] * 2


def test_costs_that_a_disturbed_launch_has_measured_are_measured_again(line):
    line.fabric.outcomes = dict.fromkeys(("ddp", "dear"), ended_well(DISTURBED))
    assert line.run(*ONE_CELL, "--set", "measure.repeats=1") == 0
    costs = [briefing.costs for briefing in line.fabric.briefings]
    assert costs == [None] * 2 + [COSTS], "the first launch is done again, by itself"


DISTURBED = dataclasses.replace(GOOD, strain=Strain(core_wait=1.0, foreign_cores=2.0))
UNCHECKED = dataclasses.replace(GOOD, check=Check(finding="nothing to compare it with"))


def labels(line):
    return [title.split()[-1] for title in line.fabric.started]


def test_flagged_rows_are_measured_again_by_the_next_run(line, capsys):
    line.fabric.outcomes["dear"] = ended_well(DISTURBED)
    assert line.run(*ONE_CELL) == 0
    assert "disturbed" in capsys.readouterr().out
    line.fabric.outcomes["dear"] = ended_well(UNCHECKED)
    assert line.run(*ONE_CELL) == 0 and labels(line) == ["dear"] * 2
    assert line.run(*ONE_CELL) == 0 and labels(line) == [], "nothing would check it another time"


def test_a_cell_without_a_valid_base_is_measured_again_as_a_whole(line, capsys):
    """The new time scale differs: the others have one at which the base was not valid."""
    line.fabric.outcomes["ddp"] = ended_well(DISTURBED)
    assert line.run(*ONE_CELL, "--set", "measure.repeats=5") == 0
    assert len(line.fabric.started) <= 3, "no round after the first"
    dear = next(record for record in line.records if record.label == "dear")
    assert flag_text(dear).startswith(
        "stopped: no verdict is possible, for ddp is not valid: disturbed"
    )
    line.fabric.outcomes.clear()
    line.fabric.settled.clear()
    assert line.run(*ONE_CELL, "--set", "measure.repeats=5") == 0
    assert sorted(labels(line)) == ["ddp"] * 5 + ["dear"] * 5
    assert line.fabric.settled == [None]
    assert line.run(*ONE_CELL, "--set", "measure.repeats=5") == 0 and labels(line) == []


def test_a_variant_of_the_bases_algorithm_is_not_the_base(line):
    """The base has a valid record, the variant has none: the others need no new measurement."""
    algorithms = "algorithms=[ddp, {name: ddp, options: {bucket_cap_mb: 1}}, dear]"
    flags = (*ONE_CELL, "--set", algorithms, "--set", "measure.repeats=1")
    line.fabric.outcomes["ddp"] = ended_well(DISTURBED)
    assert line.run(*flags, "-k", "bucket|dear") == 0
    line.fabric.outcomes.clear()
    assert line.run(*flags, "-k", "bucket|dear") == 0
    assert labels(line) == ["ddp(bucket_cap_mb=1)"]


def test_costs_of_another_fabric_are_no_word_on_this_one():
    trial = make_trial("wfbp")
    others = ({"world_size": 2}, {"network": "1gbe"}, {"model": "alexnet"})
    places = [cost_place(dataclasses.replace(trial, **other), 1.0) for other in others]
    places += [cost_place(trial, 2.0), cost_place(trial, 1.0)]
    assert len(set(places)) == len(places)
    assert cost_place(make_trial("dear"), 1.0) == places[-1]


# --- parts of a sweep -----------------------------------------------------------------------------


def test_shards_are_whole_cells_and_together_the_sweep(line, tmp_path, capsys):
    assert line.run("--shard", "1/2") == line.run("--shard", "2/2") == 0
    whole = [record.to_json() for record in line.records]
    first, second = line.records[:2], line.records[2:]
    assert len({record.trial["batch_size"] for record in first}) == 1, "compared ones together"
    assert {kept.hash for kept in first}.isdisjoint({kept.hash for kept in second})
    # On two machines each has a folder of its own.
    capsys.readouterr()
    parts = []
    for part in ("1/2", "2/2"):
        line.sweep = line.logs / "tiny"
        store_of = tmp_path / part.replace("/", "-")
        command = ["run", str(tmp_path / "tiny.yaml"), "--logs", str(store_of), "--no-plot"]
        assert cli.main([*command, "--shard", part]) == 0
        parts.append(str(store_of / "tiny"))
    capsys.readouterr()
    into = tmp_path / "merged/tiny"
    assert cli.main(["merge", *parts, "--into", str(into)]) == 0
    merged = capsys.readouterr().out
    assert {kept["hash"] for kept in whole} == {
        kept.hash for kept in store.load(into / "records.jsonl")
    }
    assert merged.count("mnist_cnn") >= 4 and (into / "reports.json").exists()
    # It goes on like any other: nothing is left to run.
    line.fabric.started.clear()
    again = ["run", str(tmp_path / "tiny.yaml"), "--logs", str(into.parent), "--no-plot"]
    assert cli.main(again) == 0 and line.fabric.started == []


def test_of_a_trial_that_stands_in_two_parts_the_good_record_counts(line, tmp_path):
    assert line.run(*ONE_CELL) == 0
    good = tmp_path / "good"
    line.sweep.rename(good)
    line.fabric.outcomes["ddp"] = TOO_SLOW
    assert line.run(*ONE_CELL) == 1
    for order in ([good, line.sweep], [line.sweep, good]):
        into = tmp_path / f"into-{order[0].name}"
        assert cli.main(["merge", *map(str, order), "--into", str(into)]) == 0
        newest = store.latest(store.load(into / "records.jsonl"))
        assert [record.status for record in newest.values()] == ["ok", "ok"]


def _noted(record: Record, kind: str) -> Record:
    note = Note(kind=kind, text=f"{kind}: another program used the cores")
    return dataclasses.replace(record, notes=[note])


@pytest.mark.parametrize("kind", ["disturbed", "diverged"])
def test_of_a_trial_that_stands_in_two_parts_the_valid_record_counts(line, tmp_path, kind):
    assert line.run(*ONE_CELL) == 0
    valid, flagged = tmp_path / "valid", tmp_path / "flagged"
    shutil.copytree(line.sweep, valid)
    shutil.copytree(line.sweep, flagged)
    records = store.load(valid / "records.jsonl")
    (flagged / "records.jsonl").unlink()
    for record in records:
        store.append(flagged / "records.jsonl", _noted(record, kind))
    for order in ([valid, flagged], [flagged, valid]):
        into = tmp_path / f"into-{order[0].name}"
        assert cli.main(["merge", *map(str, order), "--into", str(into)]) == 0
        newest = store.latest(store.load(into / "records.jsonl"))
        assert [flag(record) for record in newest.values()] == [None, None]


def test_of_a_part_the_newest_record_of_a_trial_counts_and_missing_ones_are_told(
    line, tmp_path, capsys
):
    assert line.run(*ONE_CELL) == 0
    line.fabric.outcomes["ddp"] = TOO_SLOW
    assert line.run(*ONE_CELL, "--rerun", "all") == 1
    capsys.readouterr()
    assert cli.main(["merge", str(line.sweep), "--into", str(tmp_path / "into")]) == 0
    merged = store.Comparison.load(tmp_path / "into").results(tmp_path / "into")
    assert [record.status for record in merged] == ["timeout", "ok"]
    messages = capsys.readouterr().err
    assert messages == "2 of 4 trials of the experiment: no record in any part\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run {} --shard 3/2", "--shard 3/2: must be PART/PARTS"),
        ("run {} --shard 0/2", "--shard 0/2: must be PART/PARTS"),
        ("run {} --shard half", "--shard half: must be PART/PARTS"),
        ("run {} --shard 1/3", "at most 2 parts, so that compared trials stay together"),
        ("run tyni", "unknown experiment 'tyni'"),
        ("run suit", "did you mean 'suite'?"),
        ("merge {logs}/no --into {logs}/new", "has no experiment.json"),
        ("merge {logs} --into {logs}", "exists; merge into a new folder"),
    ],
)
def test_a_part_that_there_is_not_is_one_clear_line(line, capsys, words, message):
    line.logs.mkdir()
    text = words.format(line._experiment, logs=line.logs)
    assert cli.main(text.split()) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error and line.fabric.started == []


def test_parts_of_different_experiments_are_not_merged(line, tmp_path, capsys):
    assert line.run(*ONE_CELL) == 0
    other = tmp_path / "other"
    line.sweep.rename(other)
    assert line.run(*ONE_CELL, "--set", "seed=2") == 0
    capsys.readouterr()
    into = tmp_path / "into"
    assert cli.main(["merge", str(other), str(line.sweep), "--into", str(into)]) == 2
    assert "are parts of different experiments" in capsys.readouterr().err and not into.exists()


def test_a_filter_may_name_several(line, capsys):
    assert line.run("-k", "bs=2|bs=4", "-k", "algorithm=dear|wfbp") == 0
    assert [(r.label, r.trial["batch_size"]) for r in line.records] == [("dear", 2), ("dear", 4)]
    capsys.readouterr()
    for text, count in (("algorithm=ddp|label=dear", 4), ("bs=4|label=wfbp|ddp", 3)):
        assert line.run("-n", "-k", text) == 0
        assert f"{count} trials" in capsys.readouterr().out
    for text in ("ddp|", "algorithm=", "|ddp"):
        assert line.run("-k", text) == 2
        assert "a part is empty" in capsys.readouterr().err


def test_a_dry_run_prints_what_a_shell_reads(line, tmp_path, capsys):
    words = ("-nq", "-nk", "bs=2", "-qn", "-k", "dear", "--set", "launcher=slurm")
    words += ("--set", "launcher_options.tasks_per_node=1")
    assert line.run(*words) == 0
    script = capsys.readouterr().out.splitlines()[-1]
    kept = "--set launcher=slurm --set launcher_options.tasks_per_node=1"
    assert script.endswith(f"-q -k bs=2 -q -k dear {kept}"), script
    line.logs = tmp_path / "two words"
    assert line.run("-n", *ONE_CELL) == 0
    assert f"'{line.logs}/tiny/" in capsys.readouterr().out


def test_a_trial_that_does_not_fit_is_recorded_and_the_others_run(line, monkeypatch, capsys):
    def misfit(trial):
        return "too much memory" if trial.batch_size == 4 else None

    monkeypatch.setattr(fabric, "misfit", misfit)
    monkeypatch.setattr(sweep, "misfit", misfit)
    assert line.run() == 0
    statuses = {(record.trial["batch_size"], record.status) for record in line.records}
    assert statuses == {(2, "ok"), (4, "unsupported")}
    capsys.readouterr()
    assert line.run("-k", "bs=4") == 2, "nothing that could run"
    assert "error: too much memory" in capsys.readouterr().err


def test_the_lines_of_the_references_report_are_printed_where_an_experiment_says_so(line, capsys):
    assert line.run(*ONE_CELL) == 0
    assert "All Reports" not in capsys.readouterr().out
    assert line.run(*ONE_CELL, "--set", "report_lines=true") == 0
    out = capsys.readouterr().out
    assert "==== All Reports ======" in out and "rdma:0,ddp,8.000" in out
