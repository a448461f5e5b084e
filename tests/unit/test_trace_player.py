"""The bandwidth trace of a network: what it changes, and when."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from common.emulation import trace
from common.emulation.cluster import EmulatedCluster
from common.emulation.hosts import network
from common.emulation.links import switched
from common.emulation.links.profile import Stretch, network_profile
from common.emulation.trace import TracePlayer


class _Cluster:
    def __init__(self, time_scale: float) -> None:
        self.time_scale, self.hosts = time_scale, ("h0", "h1")
        stretches = (Stretch(gbps=1.0, for_s=0.5), Stretch(gbps=2.0, for_s=0.25))
        self.profile = SimpleNamespace(trace=stretches, gbps=10.0)
        self.links = SimpleNamespace(broken=lambda: None)
        self.rates: list[tuple[int, float]] = []

    def set_rate(self, host: int, gbps: float) -> None:
        self.rates.append((host, gbps))


def test_a_trace_goes_by_emulated_seconds(monkeypatch, tmp_path):
    """Stretches last ten times as long on this machine at time scale 10."""
    now, waits = [100.0], []
    monkeypatch.setattr(trace, "wait_until_measuring", lambda phase, ended: True)
    monkeypatch.setattr(trace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cluster = _Cluster(time_scale=10.0)
    monkeypatch.setattr(trace, "_LOOK_S", 100.0)
    (tmp_path / "phase-0-rank0").write_text("1 measuring")
    player = TracePlayer(cluster, tmp_path, 0)

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += seconds + 0.125  # the change took so long
        return len(waits) == 3

    monkeypatch.setattr(player, "_ended", SimpleNamespace(wait=wait))
    player._run()
    assert waits == [5.0, 2.5 - 0.125, 5.0 - 0.125]
    assert cluster.rates[:6] == [(0, 1.0), (1, 1.0), (0, 2.0), (1, 2.0), (0, 1.0), (1, 1.0)]
    assert cluster.rates[6:] == [(0, 10.0), (1, 10.0)], "at the end, the rate of the profile"
    assert player.changes == 3 and player.error is None


def test_a_cluster_with_changed_rates_keeps_them_when_a_cut_link_is_restored(monkeypatch):
    calls = []
    cluster = EmulatedCluster(hosts=2, profile=network_profile("10gbe"))
    cluster.hosts = ("h0", "h1")
    cluster.gbps = [1.0, 10.0]
    links = {"shape": lambda: calls.append("shape"), "set_rate": lambda *to: calls.append(to)}
    cluster.links = SimpleNamespace(**links)
    monkeypatch.setattr(network, "batch", lambda *lines: None)
    cluster.restore()
    assert calls == ["shape", (0, 1.0)] and cluster.gbps == [1.0, 10.0]


ECHO = "import sys; print('ready 0 1', flush=True); [print('ok', flush=True) for _ in sys.stdin]"


def test_two_threads_may_ask_the_switch_at_once(monkeypatch, tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{ECHO}\n")
    program.chmod(0o755)
    monkeypatch.setattr(switched, "PROGRAM", program)
    monkeypatch.setattr(switched, "_ANSWER_S", 5.0)
    asked = switched.SwitchProgram([])
    try:
        with ThreadPoolExecutor(2) as pool:
            for answers in pool.map(lambda _: [asked.ask("a") for _ in range(200)], range(2)):
                assert answers == ["ok"] * 200
    finally:
        asked.close()
