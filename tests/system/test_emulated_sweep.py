"""Whole sweeps on virtual hosts: what stands in the records, faults, and that nothing is left."""

from __future__ import annotations

import re
import signal

import psutil
import pytest

from common.emulation import sandbox
from tests.system.processes import wait_for
from tests.system.sandboxes import Outside
from tests.system.sweeps import ENDLESS, Driver, check_fabric, processes_of, repeats

pytestmark = [
    pytest.mark.skipif(bool(sandbox.unable()), reason=f"no virtual hosts: {sandbox.unable()}"),
    pytest.mark.timeout(300),
]

ENDS = (signal.SIGTERM, signal.SIGKILL)
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


@pytest.fixture
def replayed(tmp_path):
    return Driver(tmp_path, REPLAYED)


@pytest.mark.full  # test_bring_your_own sees the same of a fabric where compute is replayed
def test_real_training_on_virtual_hosts(tmp_path):
    before, driver = Outside.network(), Driver(tmp_path, TINY)
    done = driver.run()
    assert done.returncode == 0, done.stderr + done.stdout
    records = driver.records()
    assert {record["trial"]["algorithm"] for record in records} == {"ddp", "dear"}
    for record in records:
        assert record["status"] == "ok" and record["check"]["matches_reference"]
        assert record["trial"]["network"] == "1gbe" and record["trial"]["world_size"] == 2
    # The check splits the block of 3 steps into two, to watch a step between them.
    check_fabric(driver, records, gbps=1.0, time_scale=1.0, blocks=[2, 2])
    assert "emulated" in done.stdout and "1gbe" in done.stdout
    assert Outside.network() == before and processes_of(tmp_path) == []


@pytest.mark.full
def test_replayed_compute_and_time_scale(replayed):
    (record,) = replayed.measured()
    assert record["fabric"]["time_scale"] == 2.0 and record["status"] == "ok"
    assert record["check"]["matches_reference"] and record["check"]["replicas_agree"]
    (steps,) = repeats(record)
    # 64 samples at 253.1 per second are 0.253 s; communication and a busy machine come on top.
    assert min(steps) > 0.25
    # The recorded times, not those of this machine; and 102 MB, with headers, through each of two
    # 10 Gb/s links.
    compute, bound = record["results"][0]["compute"], record["bound"]
    assert compute["forward_s"] + compute["backward_s"] > 0.25
    assert bound["kind"] == "dear" and bound["wire_limit_s"] == pytest.approx(0.0855, rel=0.01)
    assert bound["compute_limit_s"] <= bound["step_s"]
    # That of the GPU: 307 MB at 616 GB/s.
    assert compute["update_s"] == pytest.approx(0.0005, abs=0.0003)


@pytest.mark.full
def test_a_cell_finds_its_time_scale_and_is_measured_at_twice_that(tmp_path):
    driver = Driver(tmp_path, REPLAYED.replace(", time_scale: 2", ""))
    flags = ["--set", "measure.repeats_at_2k=1", "--set", "algorithms=[dear, ddp]"]
    done = driver.run(*flags)
    assert done.returncode == 0, done.stderr + done.stdout
    records = driver.records()
    scales = {record["fabric"]["time_scale"] for record in records}
    assert len(records) == 2 and len(scales) == 1, "one scale for the whole cell"
    (scale,) = scales
    for record in records:
        assert record["fabric"]["time_scale_reason"] != "given"
        assert record["fabric"]["calibration"]["cpu_s_per_byte"] > 0
        assert record["fabric"]["calibration"]["memory_bytes_per_s"] > 1e8
        assert record["systematic"]["time_scale"] == 2 * scale
        (steps,) = record["systematic"]["iters"]
        # Emulated seconds there, too: at k and at 2k a step takes what it does.
        assert 0.2 < steps[0][0] < 2
        assert all(launch["time_scale"] <= scale for launch in record["set_aside"])
    assert sorted(record["order"]["positions"] for record in records) == [[0], [1]]
    assert len({record["order"]["seed"] for record in records}) == 1
    assert "systematic" in done.stdout


@pytest.mark.full
def test_ranks_of_one_host_and_an_axis_of_networks(tmp_path):
    driver = Driver(tmp_path, TINY)
    flags = ["--ranks-per-host", "2", "--set", "networks=[1gbe, 100mbit]", "-k", "dear"]
    fast, slow = driver.measured(*flags)
    assert [fast["trial"]["network"], slow["trial"]["network"]] == ["1gbe", "100mbit"]
    assert fast["trial"]["world_size"] == slow["trial"]["world_size"] == 4
    assert fast["trial"]["ranks_per_host"] == 2
    assert slow["fabric"]["network"]["measured"][0]["up_gbps"] < 0.2


@pytest.mark.full
def test_a_link_cut_for_a_while_delays_but_does_not_fail(replayed):
    flags = [
        "--set",
        "faults=[{kind: link_down, host: 1, at_s: 0.1, for_s: 0.5}]",
        "-k",
        "link_down",
    ]
    (record,) = replayed.measured(*flags)
    assert record["status"] == "ok" and record["check"]["replicas_agree"]
    assert [event["ok"] for event in record["fabric"]["fault_events"]] == [True, True]
    assert record["fabric"]["fault_events"][0]["host"] == "h1"


@pytest.mark.full
def test_a_link_cut_for_good_fails_the_trial_names_the_host_and_the_sweep_goes_on(replayed):
    flags = ["--set", "faults=[{kind: link_down, host: 1, at_s: 0}]"]
    more = ["--set", "collective_timeout_s=5", "--set", "measure.steps_per_iter=1000"]
    done = replayed.run(*flags, *more, "-k", "link_down", "--set", "algorithms=[dear, wfbp]")
    assert done.returncode == 1, done.stderr + done.stdout
    records = replayed.records()
    assert [record["status"] for record in records] == ["failed", "failed"]
    assert all("h1" in record["error"]["message"] for record in records)
    assert all(record["fabric"]["fault_events"][0]["ok"] for record in records)


def test_a_delay_that_the_links_cannot_change_is_refused_before_anything_runs(replayed):
    fault = "faults=[{kind: link_delay, host: 1, delay_us: 5}]"
    done = replayed.run("--set", fault, "--set", "cluster.links=tc")
    assert done.returncode == 2, done.stderr + done.stdout
    *_, line = done.stderr.strip().splitlines()  # above it stands what is being done
    assert re.search(r"faults: link_delay h1 5 us at 0 s: .*use links: switch$", line)


@pytest.mark.full
def test_a_trial_whose_switch_dies_fails_and_the_next_has_another_switch(replayed):
    more = ["--set", "collective_timeout_s=5", "--set", "cluster.links=switch"]
    process = replayed.start(*more, "--set", "algorithms=[dear, wfbp]")
    try:
        replayed.worker("dear", rank=0, phase="measuring")
        below = psutil.Process(process.pid).children(recursive=True)
        (switch,) = [child for child in below if child.name() == "link_switch"]
        switch.kill()
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, stdout + stderr
    records = {record["trial"]["algorithm"]: record for record in replayed.records()}
    error = records["dear"]["error"]["message"]
    assert error.startswith("the switch of the virtual hosts was killed by signal 9")
    assert (
        records["wfbp"]["status"] == "ok"
        and records["wfbp"]["fabric"]["network"]["links"] == "switch"
    )


@pytest.mark.full
def test_two_sites(tmp_path):
    driver = Driver(tmp_path, TINY.replace("hosts: 2, network: 1gbe", "hosts: 4, network: wan"))
    (record,) = driver.measured("-k", "dear")
    assert record["status"] == "ok" and record["check"]["replicas_agree"]
    delays = {(row["source"], row["target"]): row for row in record["fabric"]["network"]["delays"]}
    assert delays["h1", "h2"]["requested_us"] == 20000
    assert 19000 < delays["h1", "h2"]["delay_us"] < 25000
    assert record["fabric"]["network"]["links"] == "switch"
    (launch,) = record["fabric"]["network"]["launches"]
    assert launch["repeat"] == 0 and launch["frames"] > 1000


@pytest.mark.full
def test_a_slow_host_slows_everybody_and_a_slow_link_only_communication(replayed):
    slow = "{kind: slow_host, host: 1, factor: 3}"
    rate = "{kind: link_rate, host: 0, rate: 500mbit}"
    plain, slowed, limited = replayed.measured("--set", f"faults=[{slow}, {rate}]")
    median = [sorted(repeats(record)[0])[1] for record in (plain, slowed, limited)]
    # Compute alone takes 0.76 s on the slow host; 2 x 102 MB / 2 through 0.5 Gb/s take 1.6 s.
    assert median[1] > 0.7 and median[2] > 1.2
    assert all(event["ok"] for r in (slowed, limited) for event in r["fabric"]["fault_events"])


@pytest.mark.full
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.full) for n in ENDS)],
)
def test_a_driver_that_ends_in_mid_trial_leaves_nothing(replayed, number):
    before = Outside.network()
    process = replayed.start("--set", ENDLESS)
    try:
        replayed.worker("dear", rank=0)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == (-9 if number == signal.SIGKILL else 130)
        wait_for(lambda: not processes_of(replayed.folder))
    finally:
        process.kill()
        process.wait()
    assert Outside.network() == before
    if number != signal.SIGKILL:
        (record,) = replayed.records()
        assert record["status"] == "interrupted"
