"""Faults: done at their time, undone, and told; first on a stand-in, then on virtual hosts."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.emulation.config import Fault
from common.emulation.faults import FaultInjector, blame, check_fault
from common.emulation.links.profile import NetworkProfile, Stretch
from common.emulation.trace import TracePlayer
from dear.errors import UserError
from tests.system.processes import FOREVER, LIMIT_S, wait_for


class StandIn:
    """Notes what is done to the cluster instead of doing it."""

    def __init__(self, broken: str = "") -> None:
        self.calls: list[tuple] = []
        self._broken = broken
        self.links = self
        self.profile = NetworkProfile(name="made", gbps=10)

    def _note(self, name: str, *values: object) -> None:
        self.calls.append((name, *values))
        if name == self._broken:
            raise RuntimeError(f"tc: {name} refused")

    def set_link(self, host: int, up: bool) -> None:
        self._note("set_link", host, up)

    def set_rate(self, host: int, gbps: float) -> None:
        self._note("set_rate", host, gbps)

    def set_delay(self, host: int, latency_us: float) -> None:
        self._note("set_delay", host, latency_us)

    def restore(self) -> None:
        self._note("restore")


class Trial:
    """A trial's folder and the fault in it, whose ranks are where `phases` says one by one."""

    def __init__(
        self,
        folder: Path,
        fault: Fault,
        *,
        broken: str = "",
        time_scale: float = 1.0,
        phases: Sequence[str] = ("measuring",),
    ) -> None:
        self.folder, self.cluster = folder, StandIn(broken)
        self.injector = FaultInjector(fault, self.cluster, folder, 1, time_scale, 2)
        left = list(phases)
        (folder / "phase-1-rank0").write_text(f"{os.getpid()} warming up")
        look = self.injector._phase

        def phase(rank: int) -> tuple[int, str]:
            if rank == 0:
                text = left.pop(0) if len(left) > 1 else left[0]
                (folder / "phase-1-rank0").write_text(f"{os.getpid()} {text}")
            return look(rank)

        self.injector._phase = phase
        self.injector.start()

    def after(self, calls: int) -> list[dict]:
        """The events of a trial that ends when so much has been done to the cluster."""
        wait_for(lambda: len(self.cluster.calls) >= calls)
        return self.injector.stop()

    def slowdown(self, host: int) -> float:
        return struct.unpack("<d", (self.folder / f"pace-h{host}").read_bytes())[0]


def test_a_link_is_cut_when_measuring_begins_and_restored_when_its_time_is_over(tmp_path):
    fault = Fault(kind="link_down", host=1, at_s=0.05, for_s=0.1)
    trial = Trial(tmp_path, fault, phases=["warming up", "warming up", "measuring"])
    cut, restored = trial.after(calls=2)
    assert trial.cluster.calls == [("set_link", 1, False), ("restore",)]
    assert (cut["what"], cut["host"], cut["ok"]) == ("link cut", "h1", True)
    assert (restored["what"], restored["ok"]) == ("link restored", True)
    assert cut["at_s"] >= 0.05
    assert restored["at_s"] - cut["at_s"] >= 0.09


def test_times_are_emulated(tmp_path):
    began = time.monotonic()
    trial = Trial(tmp_path, Fault(kind="link_down", host=1, at_s=0.02), time_scale=10.0)
    (cut,) = trial.after(calls=1)
    elapsed = time.monotonic() - began
    assert elapsed >= 0.19
    assert 0.02 <= cut["at_s"] <= elapsed / 10 + 0.01


def test_what_is_meant_for_good_lasts_until_the_trial_has_ended(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_rate", host=0, rate="100mbit"))
    (changed,) = trial.after(calls=1)
    assert trial.cluster.calls == [("set_rate", 0, 0.1), ("set_rate", 0, 10)]
    assert changed["what"] == "link changed to 100mbit"


def test_a_latency_changes_and_comes_back(tmp_path):
    fault = Fault(kind="link_delay", host=1, delay_us=5000, for_s=0.05)
    assert fault.title == "link_delay h1 5000 us at 0 s for 0.05 s"
    trial = Trial(tmp_path, fault)
    changed, back = trial.after(calls=2)
    assert trial.cluster.calls == [("set_delay", 1, 5000), ("restore",)]
    assert (changed["what"], back["what"]) == ("latency changed to 5000 us", "latency back")


class Traced(StandIn):
    """Cluster of three hosts, whose links have a trace."""

    hosts = (0, 1, 2)
    time_scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        stretches = (Stretch(gbps=1, for_s=0.02), Stretch(gbps=5, for_s=0.03))
        self.profile = NetworkProfile(name="traced", gbps=10, trace=stretches)

    def broken(self) -> None:
        return None


@contextmanager
def played(folder: Path, calls: int) -> Iterator[tuple[Traced, TracePlayer]]:
    (folder / "phase-1-rank0").write_text("1 warming up")
    cluster = Traced()
    with TracePlayer(cluster, folder, 1) as player:
        time.sleep(0.05)
        assert cluster.calls == [], "not before it is measured"
        (folder / "phase-1-rank0").write_text("1 measuring")
        wait_for(lambda: len(cluster.calls) >= calls)
        yield cluster, player


def test_a_trace_sets_the_rates_of_all_links_again_and_again(tmp_path):
    began = time.monotonic()
    with played(tmp_path, calls=9) as (cluster, player):
        elapsed = time.monotonic() - began
    rates = [call for call in cluster.calls if call[0] == "set_rate"]
    assert rates[:9] == [("set_rate", host, gbps) for gbps in (1, 5, 1) for host in range(3)]
    back = [("set_rate", host, 10) for host in range(3)]
    assert player.changes == len(rates) // 3 - 1 and rates[-3:] == back
    assert player.error is None
    assert elapsed > 0.1, "emulated seconds: 0.02 and 0.03 at half the speed"


def test_a_trace_ends_with_the_measurement_and_not_with_the_trial(tmp_path):
    with played(tmp_path, calls=3) as (cluster, player):
        (tmp_path / "phase-1-rank0").write_text("1 timing collectives again")
        wait_for(lambda: cluster.calls[-1] == ("set_rate", 2, 10))
        player._thread.join()
        assert cluster.calls[-1] == ("set_rate", 2, 10) and player.error is None


def test_a_trial_that_never_measures_leaves_the_rates_alone(tmp_path):
    cluster = Traced()
    with TracePlayer(cluster, tmp_path, 1) as player:
        pass
    assert player.changes == 0 and cluster.calls == []


def test_a_trace_that_cannot_go_on_is_told(tmp_path):
    with played(tmp_path, calls=1) as (cluster, player):
        cluster.set_rate = lambda host, gbps: (_ for _ in ()).throw(RuntimeError("tc: refused"))
        wait_for(lambda: player.error is not None)
    assert player.error == "the trace of the network stopped: tc: refused"


def test_a_trial_that_ends_early_is_left_in_order(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=0, for_s=1000))
    cut, restored = trial.after(calls=1)
    assert cut["ok"] and restored["ok"]
    assert restored["message"] == "with the end of the trial"
    assert trial.cluster.calls[-1] == ("restore",)
    assert "fault" not in [thread.name for thread in threading.enumerate()]


LATE = (
    "but the measurement had ended; set `at_s` to less, or measure for longer "
    "(`measure.min_iter_s`, `learn.budget_s`)"
)


@pytest.mark.parametrize(
    ("fault", "phases", "message"),
    [
        (Fault(kind="link_down", host=0), ["warming up"], "the trial ended before it measured"),
        (
            Fault(kind="link_down", host=0, at_s=1000),
            ["measuring"],
            f"planned at 1000 s, {LATE}",
        ),
        (
            Fault(kind="link_down", host=0),
            ["measuring", "checking that the replicas agree"],
            f"planned at 0 s, {LATE}",
        ),
        (
            Fault(kind="kill_rank", rank=3),
            ["measuring"],
            "RuntimeError: rank 3 has not reported its process id",
        ),
    ],
    ids=["never measures", "ends early", "has measured", "unknown rank"],
)
def test_a_fault_that_does_not_happen_says_why(tmp_path, fault, phases, message):
    trial = Trial(tmp_path, fault, phases=phases)
    if "measuring" in phases:
        wait_for(lambda: trial.injector._began)
    if fault.at_s == 0 and "measuring" in phases:
        wait_for(lambda: not trial.injector._thread.is_alive())
    (event,) = trial.injector.stop()
    assert (event["ok"], event["message"]) == (False, message)
    assert trial.cluster.calls == []


def test_a_fault_that_fails_is_recorded_and_tidied_up(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=0), broken="set_link")
    (event,) = trial.after(calls=1)
    assert (event["ok"], event["message"]) == (False, "RuntimeError: tc: set_link refused")
    assert trial.cluster.calls[-1] == ("restore",)


def test_a_cluster_that_stays_broken_stops_the_sweep(tmp_path):
    trial = Trial(tmp_path, Fault(kind="link_down", host=3), broken="restore")
    with pytest.raises(RuntimeError, match="cannot undo 'link cut' on h3: tc: restore refused"):
        trial.after(calls=1)


def test_a_slow_host_is_told_to_its_ranks_and_taken_back(tmp_path):
    fault = Fault(kind="slow_host", host=2, factor=3.0, for_s=1000)
    trial = Trial(tmp_path, fault, phases=["warming up", "measuring"])
    inode = (tmp_path / "pace-h2").stat().st_ino
    wait_for(lambda: trial.slowdown(2) == 3.0)
    slowed, back = trial.injector.stop()
    assert trial.slowdown(2) == 1.0
    assert (tmp_path / "pace-h2").stat().st_ino == inode, "the ranks have that file mapped"
    assert (slowed["what"], slowed["host"]) == ("compute 3 times slower", "h2")
    assert back["what"] == "compute back at its speed"


def test_a_rank_is_killed_by_the_number_that_it_gave(tmp_path):
    victim = subprocess.Popen([sys.executable, "-c", FOREVER])
    try:
        (tmp_path / "phase-1-rank3").write_text(f"{victim.pid} measuring")
        trial = Trial(tmp_path, Fault(kind="kill_rank", rank=3))
        assert victim.wait(LIMIT_S) == -signal.SIGKILL
        wait_for(lambda: not trial.injector._thread.is_alive())
        (event,) = trial.injector.stop()
    finally:
        victim.kill()
        victim.wait()
    assert (event["what"], event["host"], event["rank"]) == ("rank 3 killed", "h1", 3)


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
    ("fault", "words"),
    [
        (Fault(kind="link_down", host=2), "host 2 runs no rank; allowed: 0 to 1"),
        (Fault(kind="kill_rank", rank=4), "there is no rank 4; allowed: 0 to 3"),
        (Fault(kind="slow_host", host=0, factor=0.5), "cannot be made faster, got factor 0.5"),
    ],
)
def test_a_fault_without_a_place_is_a_users_mistake(fault, words):
    with pytest.raises(UserError, match=words):
        check_fault(fault, hosts=8, ranks_per_host=2, world_size=4, replayed=False)
    # The third host has a rank in a larger world, and replayed compute may be made faster.
    check_fault(fault, hosts=8, ranks_per_host=2, world_size=5, replayed=True)
