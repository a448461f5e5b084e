"""The bandwidth trace of a network: what it changes, and when."""

from __future__ import annotations

from types import SimpleNamespace

from common.emulation import trace
from common.emulation.links.profile import Stretch
from common.emulation.trace import TracePlayer


class _Cluster:
    def __init__(self, time_scale: float) -> None:
        self.time_scale, self.hosts = time_scale, ("h0", "h1")
        stretches = (Stretch(gbps=1.0, for_s=0.5), Stretch(gbps=2.0, for_s=0.25))
        self.profile = SimpleNamespace(trace=stretches)
        self.rates: list[tuple[int, float]] = []

    def set_rate(self, host: int, gbps: float) -> None:
        self.rates.append((host, gbps))


def test_a_trace_goes_by_emulated_seconds(monkeypatch, tmp_path):
    """Stretches last ten times as long on this machine at time scale 10."""
    now, waits = [100.0], []
    monkeypatch.setattr(trace, "wait_until_measuring", lambda phase, ended: True)
    monkeypatch.setattr(trace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cluster = _Cluster(time_scale=10.0)
    player = TracePlayer(cluster, tmp_path, 0)

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += seconds + 0.125  # the change took so long
        return len(waits) == 3

    monkeypatch.setattr(player, "_ended", SimpleNamespace(wait=wait))
    player._run()
    assert waits == [5.0, 2.5 - 0.125, 5.0 - 0.125]
    assert cluster.rates == [(0, 1.0), (1, 1.0), (0, 2.0), (1, 2.0), (0, 1.0), (1, 1.0)]
    assert player.changes == 3 and player.error is None


def test_links_are_restored_after_the_last_change(monkeypatch, tmp_path):
    calls = []
    cluster = _Cluster(time_scale=1.0)
    cluster.links = SimpleNamespace(broken=lambda: None)
    cluster.restore = lambda: calls.append("restore")
    player = TracePlayer(cluster, tmp_path, 0)
    player.changes = 1
    thread = SimpleNamespace(start=lambda: None, join=lambda: calls.append("join"))
    monkeypatch.setattr(player, "_thread", thread)
    with player:
        assert calls == []
    assert calls == ["join", "restore"]
