"""A transfer's ends: who sends, and how."""

from __future__ import annotations

import json
import socket
import subprocess

import pytest

from common.emulation import flow


@pytest.mark.parametrize("congestion", [[], ["reno"]])
def test_a_sender_uses_the_congestion_control_that_is_asked_for(monkeypatch, capsys, congestion):
    used = []
    send = flow._send

    def noting(line: socket.socket, seconds: float, max_bytes: float) -> None:
        name = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        used.append(name.rstrip(b"\0").decode())
        send(line, seconds, max_bytes)

    monkeypatch.setattr(flow, "_send", noting)
    listening = subprocess.Popen(
        [*flow._SCRIPT, "listen", "127.0.0.1", "0"], text=True, stdout=subprocess.PIPE
    )
    with listening:
        port = listening.stdout.readline().strip()
        flow.main("connect", "127.0.0.1", port, "1", "0", "100000", *congestion)
        received = json.loads(listening.communicate(timeout=20)[0])
    assert received["bytes"] >= 100000
    with socket.socket() as other:
        default = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert used == (congestion or [default.rstrip(b"\0").decode()])
    assert json.loads(capsys.readouterr().out)["bytes"] == 0
