"""Traces that a fault could leave: processes, ports, links, namespaces, shared memory, files."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

import psutil

from common.emulation import sandbox
from tests.system.processes import finished

SOON_S = 10.0
"""Time for what is ending to end."""
TOKEN = "FAULTS_LANE"
"""Variable that all processes of a lane have."""


class Traces:
    """Snapshot of this machine, or of the sandbox that this process is in."""

    def __init__(self) -> None:
        self._before = _all()

    def left(self) -> list[str]:
        """Traces that were not there before, once all has had time to end."""
        until = time.monotonic() + SOON_S
        while (new := _all() - self._before) and time.monotonic() < until:
            time.sleep(0.05)
        return sorted(new)


def _all() -> set[str]:
    return {*_processes(), *_ports(), *_links(), *_files(Path("/dev/shm")), *_files(_temporary())}


def _processes() -> set[str]:
    """Processes that live, with their namespaces."""
    seen = set()
    token = os.environ.get(TOKEN, "")
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if not sandbox.inside() and process.environ().get(TOKEN) != token:
                continue
            words = " ".join(process.cmdline())[:150]
            seen.add(f"process {process.pid}: {words or process.name()}")
    return {text for text in seen if not text.startswith(f"process {os.getpid()}:")}


def _ports() -> set[str]:
    """Ports at which somebody of ours listens; outside a sandbox, those of child processes."""
    seen = set()
    mine = None if sandbox.inside() else {p.pid for p in psutil.Process().children(recursive=True)}
    for connection in psutil.net_connections("inet"):
        listens = connection.status == psutil.CONN_LISTEN
        if listens and (mine is None or connection.pid in mine):
            seen.add(f"port {connection.laddr.port}")
    return seen


def _links() -> set[str]:
    lines = finished(["ip", "-brief", "link"], check=True).stdout.splitlines()
    return {f"link {line.split()[0]}" for line in lines if line.strip()}


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def _files(folder: Path) -> set[str]:
    return {f"file {path}" for path in folder.iterdir()} if folder.exists() else set()
