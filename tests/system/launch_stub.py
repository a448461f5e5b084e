"""Stands in for the worker where only its process matters: `launch_stub.py FOLDER REPEAT`.

Imports nothing that takes long. `FOLDER/mode` says what it does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from common.launch.job import Job  # noqa: E402
from dear.comm.environment import rank_facts  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class StubJob(Job):
    """A job whose workers are stubs."""

    worker_module: str = ""

    @property
    def worker(self) -> list[str]:
        return [str(Path(__file__)), str(self.folder), str(self.repeat)]


def stub_job(folder: Path, mode: str, *, world_size: int, timeout_s: float = 200.0) -> StubJob:
    """`mode` is ok, or what rank 1 does: kill, exit, stop; or hang: all of them do.

    All others hang, too, except beside one that stops.
    """
    folder.mkdir(exist_ok=True)
    if not (folder / "trial.json").exists():
        (folder / "trial.json").write_text("{}")
    (folder / "mode").write_text(mode)
    return StubJob(folder=folder, repeat=0, world_size=world_size, timeout_s=timeout_s)


def place(folder: Path, rank: int) -> dict:
    """Returns the place that the stub of this rank has found itself in."""
    return json.loads((folder / f"place-{rank}.json").read_text())


def main(folder: Path, repeat: str) -> int:
    faulthandler.register(signal.SIGUSR1)
    facts = rank_facts()
    names = ("MASTER_ADDR", "COMM_CORE_IFNAME", "GLOO_SOCKET_IFNAME", "COMM_CORE_HOST_ID", "EXTRA")
    _write(
        folder / f"place-{facts.rank}.json",
        {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "launcher": facts.launcher,
            "ranks": [facts.rank, facts.world_size, facts.local_rank, facts.local_world_size],
            "store": Path(os.environ.get("DEAR_STORE", "/nosuch")).exists(),
            "env": {name: os.environ[name] for name in names if name in os.environ},
        },
    )
    (folder / f"phase-{repeat}-rank{facts.rank}").write_text(f"{os.getpid()} measuring")
    mode = (folder / "mode").read_text()
    if facts.rank == 1 and mode != "ok":
        while not all((folder / f"place-{rank}.json").exists() for rank in range(facts.world_size)):
            time.sleep(0.05)
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if mode == "exit":
            return 7
    if mode not in ("ok", "stop"):
        time.sleep(10_000)
    if facts.rank == 0:
        _write(folder / f"repeat-{repeat}.json", {"started_by": facts.launcher})
    (folder / f"phase-{repeat}-rank{facts.rank}").write_text(f"{os.getpid()} done")
    return 0


def _write(path: Path, value: dict) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
