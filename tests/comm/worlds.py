"""What tests of the backend `comm_core` share: worlds by transport, jobs that may lose ranks."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.launch.ranks import Ranks
from tests.ranks import RankPool

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
        ranks.close()


@dataclass
class Outcome:
    """How a rank of a job ended: what it returned, or the exception it raised."""

    kind: str  # "returned", the exception's type, or "died"
    value: Any  # what it returned, or the exception's text
    at: float  # time.monotonic()


class Job(Ranks):
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
        super().__init__()
        world = World(name)
        self.size = world.size
        self._folder = tempfile.TemporaryDirectory()
        store = f"{self._folder.name}/store" if join else ""
        for rank, env in enumerate(world.environments):
            arguments = (function, args, rank, world.size, store, timeout_s)
            self.function(_run_rank, *arguments, env=env, piped=True)

    def hear(self, ranks: list[int] | None = None, timeout_s: float = 20.0) -> list[Any]:
        """What each rank says next."""
        return [self._next(r, "said", timeout_s) for r in ranks or range(self.size)]

    def outcome(self, rank: int, timeout_s: float = 20.0) -> Outcome:
        return self._next(rank, "ended", timeout_s)

    def outcomes(self, ranks: list[int] | None = None, timeout_s: float = 20.0) -> list[Outcome]:
        chosen = range(self.size) if ranks is None else ranks
        return [self.outcome(rank, timeout_s) for rank in chosen]

    def _next(self, rank: int, wanted: str, timeout_s: float) -> Any:
        pipe = self.pipes[rank]
        until = time.monotonic() + timeout_s
        while True:
            if not pipe.poll(max(0.0, until - time.monotonic())):
                raise AssertionError(f"rank {rank} has not {wanted} in {timeout_s:.0f} s")
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "ended", Outcome("died", "", time.monotonic())
            if kind == wanted:
                return value
            if kind == "ended":
                raise AssertionError(f"rank {rank} ended instead: {value}")

    def end(self, rank: int) -> None:
        """Lets the process of a rank that has ended its function exit."""
        self.pipes[rank].close()
        until = time.monotonic() + 5
        while rank not in self.codes and time.monotonic() < until:
            self.wait(0.01)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._folder.cleanup()


def _run_rank(
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    size: int,
    store: str,
    timeout_s: float,
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
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


def shared_files() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob("comm_core-*")}
