"""Whole sweeps through the command line: records, resume, and what happens when things go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENDLESS = "measure.steps_per_iter=1000000"

TINY = """
name: tiny
algorithms: [allreduce, wfbp, ddp, dear]
models: [{name: mnist_cnn, batch_size: 2}]
world_sizes: [2]
measure: {repeats: 2, warmup_steps: 1, steps_per_iter: 2, check_steps: 2}
timeout_s: 60
"""


class Driver:
    """Runs `benchmarks.py` on the tiny experiment with a logs folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.experiment = folder / "tiny.yaml"
        self.experiment.write_text(TINY)
        self.logs = folder / "logs"
        self.sweep = self.logs / "tiny"

    def command(self, *flags: str) -> list[str]:
        run = [sys.executable, str(ROOT / "benchmarks.py"), "run", str(self.experiment)]
        return [*run, "--logs", str(self.logs), "--no-plot", *flags]

    def run(self, *flags: str) -> subprocess.CompletedProcess:
        return subprocess.run(self.command(*flags), capture_output=True, text=True, timeout=100)

    def start(self, *flags: str) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def records(self) -> list[dict]:
        lines = (self.sweep / "records.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def worker(self, algorithm: str, rank: int, phase: str = "measuring") -> int:
        """The process id of a rank, once it is in `phase`."""

        def find() -> int | None:
            for path in self.sweep.glob(f"mnist_cnn-*-{algorithm}-*/phase-*-rank{rank}"):
                pid, _, name = path.read_text().partition(" ")
                if name == phase:
                    return int(pid)
            return None

        return wait_for(find)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def wait_for(condition, timeout_s: float = 60.0):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not so within {timeout_s} s")


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def processes_of(folder: Path) -> list[int]:
    """Live processes whose environment or arguments name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found


def test_a_sweep_records_every_trial_and_a_second_run_runs_nothing(driver):
    first = driver.run()
    assert first.returncode == 0, first.stderr
    records = driver.records()
    algorithms = ["none", "allreduce", "wfbp", "ddp", "dear"]
    assert sorted(r["trial"]["algorithm"] for r in records) == sorted(algorithms)
    for record in records:
        assert record["status"] == "ok"
        assert record["check"]["replicas_agree"] and record["check"]["matches_reference"]
        assert [len(steps) for steps in record["repeats"]] == [2, 2]
        assert record["throughput"]["n"] == 4
        assert record["throughput"]["ci_low"] <= record["throughput"]["value"]
        assert min(record["compute"].values()) > 0
        parts = dict(record["breakdown"])
        step_s = parts.pop("step_s")
        assert sum(part or 0.0 for part in parts.values()) == pytest.approx(step_s)
    by_name = {record["trial"]["algorithm"]: record for record in records}
    assert by_name["none"]["costs"] is None
    costs = [record["costs"] for name, record in by_name.items() if name != "none"]
    assert costs == [costs[0]] * 4  # one trial has measured for all
    assert costs[0].keys() == {"all_reduce", "reduce_scatter", "all_gather", "exchange"}
    for name, kind in (("none", "compute"), ("wfbp", "wfbp"), ("dear", "dear")):
        bound = by_name[name]["bound"]
        assert bound["kind"] == kind and bound["wire_limit_s"] is None
        assert 0 < bound["compute_limit_s"] <= bound["step_s"]
        # Of the right size, that is; how near a result comes is the machine's affair.
        assert 0.01 < bound["reached"] < 30
    table = (driver.sweep / "table.md").read_text()
    assert "| of bound |" in table
    assert table.count("\n") == 2 + len(records)
    assert json.loads((driver.sweep / "reports.json").read_text())["0"]["mnist_cnn_2"].keys() == {
        "allreduce",
        "wfbp",
        "ddp",
        "dear",
    }
    log = next(driver.sweep.glob("*-dear-*/log-0-rank0.txt")).read_text()
    assert "Iter #0: " in log and "Total img/sec on 2 CPU(s): " in log

    show = [sys.executable, "benchmarks.py", "show", "--breakdown", "--logs", str(driver.logs)]
    shown = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "exposed comm" in shown and "compute limit" in shown and "dear" in shown

    second = driver.run()
    assert second.returncode == 0
    assert driver.records() == records
    assert "[1/" not in second.stderr

    again = driver.run("--rerun", "all", "-k", "wfbp")
    assert again.returncode == 0
    assert [r["trial"]["algorithm"] for r in driver.records()[len(records) :]] == ["wfbp"]
    assert "dear" in again.stdout  # the table still compares everything
    assert "not measured together with allreduce" in again.stdout


def test_the_table_holds_the_current_experiment_only(driver):
    one = ["--set", "measure.repeats=1", "-k", "dear"]
    assert driver.run(*one, "--set", "measure.steps_per_iter=1").returncode == 0
    assert driver.run(*one).returncode == 0
    assert len(driver.records()) == 2
    assert (driver.sweep / "table.md").read_text().count("\n") == 3
    show = [sys.executable, "benchmarks.py", "show", "tiny", "--json", "--logs", str(driver.logs)]
    shown = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [record["hash"] for record in json.loads(shown.stdout)] == [driver.records()[1]["hash"]]


def test_repeats_of_compared_trials_take_turns(driver):
    driver.run("-k", "n=2", "-k", "d", "--set", "algorithms=[ddp, dear]")
    first, second = (driver.records()[i] for i in (0, 1))
    assert first["run"] == second["run"]
    order = sorted(driver.sweep.glob("*/repeat-*.json"), key=lambda path: path.stat().st_mtime)
    names = ["dear" if "-dear-" in str(path) else "ddp" for path in order]
    assert names == ["ddp", "dear", "dear", "ddp"]


def test_json_prints_the_records_and_nothing_else(driver):
    done = driver.run("--json", "-k", "none", "--set", "measure.repeats=1", "-k", "n=1")
    assert done.returncode == 2  # no title holds "none"; the baseline is called single worker
    done = driver.run("--json", "-k", "single worker", "--set", "measure.repeats=1")
    assert done.returncode == 0
    assert [record["id"] for record in json.loads(done.stdout)] == [
        record["id"] for record in driver.records()
    ]


def test_a_killed_worker_fails_its_trial_alone_and_only_that_is_run_again(driver):
    flags = ["--set", "measure.steps_per_iter=40", "--set", "measure.repeats=1", "-k", "n=2"]
    sweep = driver.start(*flags)
    victim = driver.worker("wfbp", rank=1)
    other = driver.worker("wfbp", rank=0)
    os.kill(victim, signal.SIGKILL)
    _, stderr = sweep.communicate(timeout=100)
    assert sweep.returncode == 1, stderr
    by_name = {record["trial"]["algorithm"]: record for record in driver.records()}
    assert by_name["wfbp"]["status"] == "failed"
    assert by_name["wfbp"]["error"]["rank"] == 1
    assert "killed by signal 9" in by_name["wfbp"]["error"]["message"]
    assert {name for name, r in by_name.items() if r["status"] == "ok"} == {
        "allreduce",
        "ddp",
        "dear",
    }
    assert not alive(victim) and not alive(other)
    assert processes_of(driver.logs) == []

    again = driver.run(*flags)
    assert again.returncode == 0, again.stderr
    assert [r["trial"]["algorithm"] for r in driver.records()[4:]] == ["wfbp"]


def test_ctrl_c_keeps_finished_records_and_leaves_no_process(driver):
    one = ["--set", "measure.repeats=1", "-k", "n=2"]
    assert driver.run(*one, "-k", "allreduce").returncode == 0
    finished = driver.records()
    sweep = driver.start(*one, "--set", ENDLESS)
    pids = [driver.worker("allreduce", rank) for rank in (0, 1)]
    sweep.send_signal(signal.SIGINT)
    _, stderr = sweep.communicate(timeout=30)
    assert sweep.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert driver.records()[:1] == finished
    assert driver.records()[1]["status"] == "interrupted"
    assert not any(map(alive, pids))
    assert processes_of(driver.logs) == []


def test_workers_die_with_a_killed_driver(driver):
    sweep = driver.start("--set", ENDLESS, "-k", "allreduce")
    pids = [driver.worker("allreduce", rank) for rank in (0, 1)]
    sweep.kill()
    sweep.communicate(timeout=30)
    wait_for(lambda: not any(map(alive, pids)), timeout_s=20)


def test_a_trial_out_of_time_is_stopped_and_says_where_its_ranks_were(driver):
    done = driver.run(
        "--set", "timeout_s=8", "--set", ENDLESS, "-k", "dear", "--set", "measure.repeats=1"
    )
    assert done.returncode == 1
    (record,) = driver.records()
    assert record["status"] == "timeout"
    assert "rank 0: measuring" in record["error"]["message"]
    assert "Current thread" in next(driver.sweep.glob("*/log-0-rank1.txt")).read_text()


def test_an_unavailable_algorithm_is_recorded_with_its_reason(driver, tmp_path):
    # A Python that cannot see Horovod: the finder is asked before anything is started.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'horovod' else find(name, *a)\n"
    )
    flags = ["--set", "algorithms=[horovod, ddp]", "--set", "measure.repeats=1", "-k", "n=2"]
    nothing, done = (
        subprocess.run(
            driver.command(*flags, *some),
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        for some in (["-k", "horovod"], [])
    )
    assert nothing.returncode == 1  # nothing was measured
    assert done.returncode == 0  # not a failure, but said
    by_name = {record["trial"]["algorithm"]: record for record in driver.records()}
    assert by_name["horovod"]["status"] == "unsupported"
    assert "make horovod" in by_name["horovod"]["error"]["message"]
    assert by_name["ddp"]["status"] == "ok"
    assert "make horovod" in done.stdout


def test_two_runs_of_one_sweep_do_not_mix(driver):
    first = driver.start("--set", ENDLESS, "-k", "allreduce")
    driver.worker("allreduce", rank=0)
    second = driver.run()
    assert second.returncode == 2
    assert "another run" in second.stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
