"""Types of the compiled module, which torch/bindings.cc defines."""

from typing import TypedDict

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

class MismatchError(dist.DistBackendError):
    """Error of a group in which two ranks called different operations."""

class Times:
    """Times at which an operation was queued, started and ended, on `time.monotonic()`."""

    @property
    def enqueued_s(self) -> float: ...
    @property
    def started_s(self) -> float: ...
    @property
    def finished_s(self) -> float: ...

class Work(dist.Work):
    def times(self) -> Times: ...

class CoreBackend(Backend):
    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        name: str,
        towards: str,
        timeout_s: float,
    ) -> None: ...
    def add_window(self, number: int, memory: torch.Tensor) -> None: ...
    def remove_window(self, number: int) -> None: ...
    def window_versions(self, number: int) -> list[int]: ...
    def read_window(
        self, number: int, first: int, count: int, reset: bool, clear: bool
    ) -> torch.Tensor: ...
    def window_operation(
        self,
        kind: str,
        number: int,
        peer: int,
        slot: int,
        offset: int,
        tensor: torch.Tensor | None,
        op: dist.ReduceOp,
    ) -> Work: ...
    def regimes(self, operation: str) -> list[tuple[str, int, str]]: ...
    def summary(self) -> str: ...
    def dropped_connections(self) -> int: ...

class Event(TypedDict):
    """Operation that has ended; times in seconds on `time.monotonic()`."""

    operation: str
    dtype: str
    priority: int
    group: str
    sequence: int
    nbytes: int
    enqueued_s: float
    started_s: float
    finished_s: float
    ok: bool

def shared_bytes(nbytes: int) -> torch.Tensor: ...
def regimes(operation: str, ranks: int, hosts: int) -> list[tuple[str, int, str]]: ...
def set_priority(priority: int) -> None: ...
def priority() -> int: ...
def events() -> list[Event]: ...
def last_awaited_s() -> float: ...
def note_all_awaited() -> None: ...
def lulls_s(after_s: float) -> list[tuple[float, float]]: ...
def shut_down() -> None: ...
