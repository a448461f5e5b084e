"""Whole sweeps on virtual hosts: what stands in the records, faults, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.emulation import sandbox
from tests.test_sweep import wait_for

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(bool(sandbox.unable()), reason=f"no virtual hosts: {sandbox.unable()}"),
    pytest.mark.timeout(300),
]

TINY = """
name: tiny
algorithms: [ddp, dear]
models: [{name: mnist_cnn, batch_size: 2}]
cluster: {hosts: 2, network: 1gbe}
baseline: false
measure: {repeats: 1, warmup_steps: 1, steps_per_iter: 3, check_steps: 2}
timeout_s: 120
"""
REPLAYED = """
name: tiny
algorithms: [dear]
models: [{name: resnet50@rtx2080ti-modelled, batch_size: 64}]
cluster: {hosts: 2, network: 10gbe, time_scale: 2}
baseline: false
measure: {repeats: 1, warmup_steps: 1, steps_per_iter: 3, check_steps: 1}
collective_timeout_s: 20
timeout_s: 120
"""


class Driver:
    """Runs `benchmarks.py` on a small experiment with a logs folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, text: str, *flags: str) -> list[str]:
        experiment = self.folder / "tiny.yaml"
        experiment.write_text(text)
        run = [sys.executable, str(ROOT / "benchmarks.py"), "run", str(experiment), "--no-plot"]
        return [*run, "--logs", str(self.folder / "logs"), *flags]

    def run(self, text: str, *flags: str) -> subprocess.CompletedProcess:
        command = self.command(text, *flags)
        return subprocess.run(
            command, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL
        )

    def records(self) -> list[dict]:
        lines = (self.folder / "logs" / "tiny" / "records.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def measuring(self) -> bool:
        """Whether a rank 0 has got as far as measuring."""
        paths = self.folder.glob("logs/tiny/*/phase-*-rank0")
        return any(path.read_text().endswith("measuring") for path in paths)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def outside() -> tuple[str, str]:
    """What of the network anybody else can see."""
    commands = (["ip", "netns", "list"], ["ip", "-o", "link"])
    return tuple(subprocess.run(c, capture_output=True, text=True).stdout for c in commands)


def workers(folder: Path) -> list[str]:
    """Command lines of processes that have to do with the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if str(folder) in text and int(path.parent.name) != os.getpid():
            found.append(text)
    return found


def test_real_training_on_virtual_hosts(driver):
    before = outside()
    done = driver.run(TINY)
    assert done.returncode == 0, done.stderr + done.stdout
    ddp, dear = driver.records()
    for record in (ddp, dear):
        assert record["fabric"] == "emulated" and record["time_scale"] == 1.0
        assert record["status"] == "ok" and record["check"]["matches_reference"]
        assert record["network"]["requested"]["gbps"] == 1.0
        assert [link["host"] for link in record["network"]["measured"]] == ["h0", "h1"]
        assert all(0 < link["up_gbps"] <= 1.2 for link in record["network"]["measured"])
        assert record["trial"]["network"] == "1gbe" and record["trial"]["world_size"] == 2
        assert record["unfaithful"] in (True, False)
    assert "emulated" in done.stdout and "1gbe" in done.stdout
    assert outside() == before and workers(driver.folder) == []


def test_replayed_compute_and_time_scale(driver):
    done = driver.run(REPLAYED)
    assert done.returncode == 0, done.stderr + done.stdout
    (record,) = driver.records()
    assert record["time_scale"] == 2.0 and record["status"] == "ok"
    assert record["check"]["matches_reference"] and record["check"]["replicas_agree"]
    (steps,) = record["repeats"]
    # 64 samples at 253.1 per second are 0.253 s; communication and a busy machine come on top.
    assert 0.25 < min(steps) < 2.5
    # The recorded times, not those of this machine; and 102 MB through each of two 10 Gb/s links.
    compute, bound = record["compute"], record["bound"]
    assert 0.25 < compute["forward_s"] + compute["backward_s"] < 2.5
    assert bound["kind"] == "dear" and bound["wire_limit_s"] == pytest.approx(0.0818, rel=0.01)
    assert bound["compute_limit_s"] <= bound["step_s"]
    assert 0.05 < bound["reached"] < 2


def test_ranks_of_one_host_and_an_axis_of_networks(driver):
    flags = ["--ranks-per-host", "2", "--set", "networks=[1gbe, 100mbit]", "-k", "dear"]
    done = driver.run(TINY, *flags)
    assert done.returncode == 0, done.stderr + done.stdout
    fast, slow = driver.records()
    assert [fast["trial"]["network"], slow["trial"]["network"]] == ["1gbe", "100mbit"]
    assert fast["trial"]["world_size"] == slow["trial"]["world_size"] == 4
    assert fast["trial"]["ranks_per_host"] == 2
    assert slow["network"]["measured"][0]["up_gbps"] < 0.2


def test_a_link_cut_for_a_while_delays_but_does_not_fail(driver):
    flags = [
        "--set",
        "faults=[{kind: link_down, host: 1, at_s: 0.1, for_s: 0.5}]",
        "-k",
        "link_down",
    ]
    done = driver.run(REPLAYED, *flags)
    assert done.returncode == 0, done.stderr + done.stdout
    (record,) = driver.records()
    assert record["status"] == "ok" and record["check"]["replicas_agree"]
    assert [event["ok"] for event in record["fault_events"]] == [True, True]
    assert record["fault_events"][0]["host"] == "h1"


def test_a_link_cut_for_good_fails_the_trial_names_the_host_and_the_sweep_goes_on(driver):
    flags = ["--set", "faults=[{kind: link_down, host: 1, at_s: 0}]"]
    more = ["--set", "collective_timeout_s=5", "--set", "measure.steps_per_iter=1000"]
    done = driver.run(
        REPLAYED, *flags, *more, "-k", "link_down", "--set", "algorithms=[dear, wfbp]"
    )
    assert done.returncode == 1, done.stderr + done.stdout
    records = driver.records()
    assert [record["status"] for record in records] == ["failed", "failed"]
    assert all("h1" in record["error"]["message"] for record in records)
    assert all(record["fault_events"][0]["ok"] for record in records)


def test_a_rank_killed_fails_the_trial_and_names_it(driver):
    flags = ["--set", "faults=[{kind: kill_rank, rank: 1, at_s: 0.1}]", "-k", "kill_rank"]
    done = driver.run(REPLAYED, *flags, "--set", "measure.steps_per_iter=1000")
    assert done.returncode == 1, done.stderr + done.stdout
    (record,) = driver.records()
    assert record["status"] == "failed" and record["error"]["rank"] == 1
    assert "rank 1" in record["error"]["message"]


def test_a_slow_host_slows_everybody_and_a_slow_link_only_communication(driver):
    slow = "{kind: slow_host, host: 1, factor: 3}"
    rate = "{kind: link_rate, host: 0, rate: 500mbit}"
    done = driver.run(REPLAYED, "--set", f"faults=[{slow}, {rate}]")
    assert done.returncode == 0, done.stderr + done.stdout
    plain, slowed, limited = driver.records()
    median = [sorted(record["repeats"][0])[1] for record in (plain, slowed, limited)]
    # Compute alone takes 0.76 s on the slow host; 2 x 102 MB / 2 through 0.5 Gb/s take 1.6 s.
    assert median[1] > 0.7 and median[2] > 1.2
    assert all(event["ok"] for r in (slowed, limited) for event in r["fault_events"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_ends_in_mid_trial_leaves_nothing(driver, number):
    before = outside()
    command = driver.command(REPLAYED, "--set", "measure.steps_per_iter=100000")
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        wait_for(driver.measuring, timeout_s=120)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == (-9 if number == signal.SIGKILL else 130)
        wait_for(lambda: not workers(driver.folder))
    finally:
        process.kill()
        process.wait()
    assert outside() == before
    if number != signal.SIGKILL:
        (record,) = driver.records()
        assert record["status"] == "interrupted"
