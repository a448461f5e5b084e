"""What tests of the backend `comm_core` share: worlds by transport, jobs that may lose ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.ranks import RankPool

_CONTEXT = multiprocessing.get_context("forkserver")

# Where each world's ranks are: "shm" share memory; "tcp" talk over loopback; digits are pretended
# hosts, one for each rank ("0011": four ranks on two hosts).
SHM = ["shm1", "shm2", "shm3", "shm4"]
TCP = ["tcp2", "tcp3", "tcp4"]
HOSTS = ["hosts001", "hosts0011", "hosts0101"]


@dataclass(frozen=True)
class World:
    """A number of ranks and the environments that place them."""

    name: str

    @property
    def size(self) -> int:
        return len(self._hosts) if self._hosts else int(self.name[3:])

    @property
    def _hosts(self) -> str:
        return self.name[5:] if self.name.startswith("hosts") else ""

    @property
    def environments(self) -> list[dict[str, str]]:
        transport = "tcp" if self.name.startswith("tcp") else "auto"
        common = {"COMM_CORE_TRANSPORT": transport, "COMM_CORE_ALLOW_LOOPBACK": "1"}
        if not self._hosts:
            return [common] * self.size
        return [{**common, "COMM_CORE_HOST_ID": f"host{h}"} for h in self._hosts]


@contextmanager
def pool(name: str, timeout_s: float = 20.0) -> Iterator[RankPool]:
    world = World(name)
    ranks = RankPool(world.size, timeout_s, "comm_core", world.environments)
    try:
        yield ranks
    finally:
        if not ranks.broken:
            ranks.close()


@dataclass
class Outcome:
    """How a rank of a job ended: what it returned, or the exception it raised."""

    kind: str  # "returned", the exception's type, or "died"
    value: Any  # what it returned, or the exception's text
    at: float  # time.monotonic()


class Job:
    """Rank processes that run `function(rank, say, *args)` once and may be killed meanwhile.

    They join a world of their own first, with the given timeout. `say(anything)` reaches `hear`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 10.0,
        join: bool = True,
    ) -> None:
        world = World(name)
        self.size = world.size
        self._folder = tempfile.TemporaryDirectory()
        self._pipes = []
        self.processes = []
        for rank, environment in enumerate(world.environments):
            ours, theirs = _CONTEXT.Pipe()
            store = f"{self._folder.name}/store" if join else ""
            process = _CONTEXT.Process(
                target=_run_rank,
                args=(function, args, rank, world.size, store, environment, timeout_s, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def hear(self, ranks: list[int] | None = None, timeout_s: float = 20.0) -> list[Any]:
        """What each rank says next."""
        return [self._next(r, "said", timeout_s) for r in ranks or range(self.size)]

    def outcome(self, rank: int, timeout_s: float = 20.0) -> Outcome:
        return self._next(rank, "ended", timeout_s)

    def outcomes(self, ranks: list[int] | None = None, timeout_s: float = 20.0) -> list[Outcome]:
        chosen = range(self.size) if ranks is None else ranks
        return [self.outcome(rank, timeout_s) for rank in chosen]

    def _next(self, rank: int, wanted: str, timeout_s: float) -> Any:
        pipe = self._pipes[rank]
        until = time.monotonic() + timeout_s
        while True:
            if not wait([pipe], timeout=max(0.0, until - time.monotonic())):
                raise AssertionError(f"rank {rank} has not {wanted} in {timeout_s:.0f} s")
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "ended", Outcome("died", "", time.monotonic())
            if kind == wanted:
                return value
            if kind == "ended":
                raise AssertionError(f"rank {rank} ended instead: {value}")

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self, rank: int) -> None:
        """Lets the process of a rank that has ended its function exit."""
        self._pipes[rank].close()
        self.processes[rank].join(timeout=5)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=0.05)
            if process.is_alive():
                with suppress(ProcessLookupError):  # it was ending
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    size: int,
    store: str,
    environment: dict[str, str],
    timeout_s: float,
    pipe: Any,
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(environment)
    import comm_core  # noqa: F401 - makes the backend known

    def say(anything: Any) -> None:
        pipe.send(("said", anything))

    try:
        if store:
            dist.init_process_group(
                "comm_core",
                store=dist.FileStore(store, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
        value = function(rank, say, *args)
        outcome = Outcome("returned", value, time.monotonic())
    except Exception as error:
        text = str(error) if isinstance(error, RuntimeError | ValueError | TypeError) else ""
        text = text or traceback.format_exc()
        outcome = Outcome(type(error).__name__, text, time.monotonic())
    try:
        pipe.send(("ended", outcome))
        pipe.recv()  # the parent closes it
    except (EOFError, OSError):
        pass
    os._exit(0)


def shared_files() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob("comm_core-*")}
