"""Faults: done at their time, undone, and told; first on a stand-in, then on virtual hosts."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common.emulation import sandbox
from common.emulation.config import Fault
from common.emulation.faults import FaultInjector, blame, check_fault
from dear.errors import UserError

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0


class StandIn:
    """Notes what is done to the cluster instead of doing it."""

    def __init__(self, broken: str = "") -> None:
        self.calls: list[tuple] = []
        self._broken = broken

    def _note(self, name: str, *values: object) -> None:
        self.calls.append((name, *values))
        if name == self._broken:
            raise RuntimeError(f"tc: {name} refused")

    def set_link(self, host: int, up: bool) -> None:
        self._note("set_link", host, up)

    def set_rate(self, host: int, gbps: float) -> None:
        self._note("set_rate", host, gbps)

    def restore(self) -> None:
        self._note("restore")


class Trial:
    """A trial's folder and the fault in it."""

    def __init__(self, folder: Path, fault: Fault, broken: str = "", time_scale: float = 1.0):
        self.folder, self.cluster = folder, StandIn(broken)
        self.injector = FaultInjector(fault, self.cluster, folder, 1, time_scale, 4, 2)
        self.injector.start()

    def enter(self, phase: str, rank: int = 0, pid: int | None = None) -> None:
        (self.folder / f"phase-1-rank{rank}").write_text(f"{pid or os.getpid()} {phase}")

    def wait_for_calls(self, count: int) -> None:
        wait_for(lambda: len(self.cluster.calls) >= count)

    def slowdown(self, host: int) -> float:
        return struct.unpack("<d", (self.folder / f"pace-h{host}").read_bytes())[0]


def wait_for(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.01)


def test_a_link_is_cut_when_measuring_begins_and_restored_when_its_time_is_over(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=1, at_s=0.05, for_s=0.1))
    trial.enter("warming up")
    assert trial.cluster.calls == []
    trial.enter("measuring")
    trial.wait_for_calls(2)
    cut, restored = trial.injector.stop()
    assert trial.cluster.calls == [("set_link", 1, False), ("restore",)]
    assert (cut["what"], cut["host"], cut["ok"]) == ("link cut", "h1", True)
    assert (restored["what"], restored["ok"]) == ("link restored", True)
    assert cut["at_s"] >= 0.05
    assert restored["at_s"] - cut["at_s"] >= 0.09


def test_times_are_emulated(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=1, at_s=0.02), time_scale=10.0)
    began = time.monotonic()
    trial.enter("measuring")
    trial.wait_for_calls(1)
    elapsed = time.monotonic() - began
    (cut,) = trial.injector.stop()
    assert elapsed >= 0.19
    assert 0.02 <= cut["at_s"] <= elapsed / 10 + 0.01


def test_what_is_meant_for_good_lasts_until_the_trial_has_ended(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_rate", host=0, rate="100mbit"))
    trial.enter("measuring")
    trial.wait_for_calls(1)
    (changed,) = trial.injector.stop()
    assert trial.cluster.calls == [("set_rate", 0, 0.1), ("restore",)]
    assert changed["what"] == "link changed to 100mbit"


def test_a_trial_that_ends_early_is_left_in_order(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=0, for_s=1000))
    trial.enter("measuring")
    trial.wait_for_calls(1)
    cut, restored = trial.injector.stop()
    assert cut["ok"] and restored["ok"]
    assert restored["message"] == "with the end of the trial"
    assert trial.cluster.calls[-1] == ("restore",)


def test_a_fault_of_a_trial_that_never_measures_does_not_happen(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=0))
    trial.enter("warming up")
    (event,) = trial.injector.stop()
    assert (event["ok"], event["at_s"]) == (False, None)
    assert event["message"] == "the trial ended before it measured"
    assert trial.cluster.calls == []


def test_a_fault_later_than_the_end_of_the_trial_does_not_happen(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=0, at_s=1000))
    trial.enter("measuring")
    wait_for(lambda: trial.injector._began)
    (event,) = trial.injector.stop()
    assert not event["ok"]
    assert event["message"] == "planned at 1000 s, but the measurement had ended"
    assert trial.cluster.calls == []


def test_a_fault_does_not_disturb_what_follows_the_measurement(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=0, at_s=1.5))
    trial.enter("measuring")
    wait_for(lambda: trial.injector._began)
    trial.enter("checking that the replicas agree")
    wait_for(lambda: not trial.injector._thread.is_alive())
    (event,) = trial.injector.stop()
    assert not event["ok"]
    assert "the measurement had ended" in event["message"]
    assert trial.cluster.calls == []


def test_a_fault_that_fails_is_recorded_and_tidied_up(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=0), broken="set_link")
    trial.enter("measuring")
    trial.wait_for_calls(1)
    (event,) = trial.injector.stop()
    assert (event["ok"], event["message"]) == (False, "RuntimeError: tc: set_link refused")
    assert trial.cluster.calls[-1] == ("restore",)


def test_a_cluster_that_stays_broken_stops_the_sweep(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=3), broken="restore")
    trial.enter("measuring")
    trial.wait_for_calls(1)
    with pytest.raises(RuntimeError, match="link cut on h3 stays: tc: restore refused"):
        trial.injector.stop()


def test_a_slow_host_is_told_to_its_ranks_and_taken_back(tmp_path):
    trial = Trial(tmp_path, Fault(kind="slow_host", host=2, factor=3.0, for_s=1000))
    assert trial.slowdown(2) == 1.0
    inode = (tmp_path / "pace-h2").stat().st_ino
    trial.enter("measuring")
    wait_for(lambda: trial.slowdown(2) == 3.0)
    slowed, back = trial.injector.stop()
    assert trial.slowdown(2) == 1.0
    assert (tmp_path / "pace-h2").stat().st_ino == inode, "the ranks have that file mapped"
    assert (slowed["what"], slowed["host"]) == ("compute 3 times slower", "h2")
    assert back["what"] == "compute back at its speed"


def test_a_rank_is_killed_by_the_number_that_it_gave(tmp_path):
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        trial = Trial(tmp_path, Fault(kind="kill_rank", rank=3))
        trial.enter("measuring", rank=3, pid=victim.pid)
        trial.enter("measuring")
        assert victim.wait(LIMIT_S) == -signal.SIGKILL
        (event,) = trial.injector.stop()
    finally:
        victim.kill()
        victim.wait()
    assert (event["what"], event["host"], event["rank"]) == ("rank 3 killed", "h1", 3)


def test_a_rank_that_nobody_knows_cannot_be_killed(tmp_path):
    trial = Trial(tmp_path, Fault(kind="kill_rank", rank=3))
    trial.enter("measuring")
    wait_for(lambda: not trial.injector._thread.is_alive())
    (event,) = trial.injector.stop()
    assert not event["ok"]
    assert "rank 3 has not said which process it is" in event["message"]


def test_no_thread_is_left(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=0, at_s=1000))
    trial.injector.stop()
    assert "fault" not in [thread.name for thread in threading.enumerate()]


def event(**values: object) -> dict:
    base = {"at_s": 1.02, "what": "link cut", "host": "h2", "rank": None, "for_s": None}
    return {**base, "ok": True, "message": None, **values}


def test_a_failed_trial_names_the_host_whose_fault_explains_it():
    failed = {"kind": "failed", "message": "…", "rank": 0, "where": "measuring"}
    assert blame(failed, [event()]) == "host h2: link cut at 1.0 s for good"
    assert blame({**failed, "kind": "timeout"}, [event(for_s=2.5), event()]) == (
        "host h2: link cut at 1.0 s for 2.5 s"
    )
    killed = event(what="rank 5 killed", rank=5)
    assert blame(failed, [killed]) == "host h2: rank 5 killed at 1.0 s"


def test_nothing_is_blamed_that_did_not_happen_or_did_no_harm():
    failed = {"kind": "failed", "message": "…", "rank": 0, "where": "measuring"}
    assert blame(None, [event()]) is None
    assert blame(failed, []) is None
    assert blame(failed, [event(ok=False)]) is None
    assert blame({**failed, "kind": "oom"}, [event()]) is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(kind="link_down", host=2), "host 2 runs no rank; allowed: 0 to 1"),
        (Fault(kind="kill_rank", rank=4), "there is no rank 4; allowed: 0 to 3"),
        (Fault(kind="slow_host", host=0, factor=0.5), "cannot be made faster, got factor 0.5"),
    ],
)
def test_a_fault_without_a_place_is_a_users_mistake(fault, said):
    with pytest.raises(UserError, match=said):
        check_fault(fault, hosts=8, ranks_per_host=2, world_size=4, replayed=False)


def test_faults_that_can_happen_are_let_through():
    for fault in (
        Fault(kind="link_down", host=1),
        Fault(kind="kill_rank", rank=3),
        Fault(kind="slow_host", host=0, factor=2.0),
    ):
        check_fault(fault, hosts=8, ranks_per_host=2, world_size=4, replayed=True)


@pytest.mark.skipif(sandbox.unable() is not None, reason=f"sandbox: {sandbox.unable()}")
def test_a_cut_link_carries_nothing_until_it_is_restored(tmp_path):
    program = Path(__file__).with_name("faults_program.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert sandbox.run([sys.executable, str(program), str(tmp_path)], environment) == 0
