"""Engines: collectives by the comm core (this project's backend), Gloo, MPI and Horovod."""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import dear
from dear.errors import Unavailable
from dear.lazy import torch

# Engines whose ranks mpirun starts; ranks of the others are started one by one.
MPIRUN = ("mpi", "horovod")
NAMES = ("comm_core", "comm_core_direct", "gloo", *MPIRUN)


class Engine(ABC):
    """Sums of float32 CPU tensors; every call returns the tensor with its result."""

    versions: dict[str, str]

    def empty(self, count: int) -> torch.Tensor:
        """Returns a tensor of `count` floats in the memory that suits the engine best."""
        return torch.empty(count, dtype=torch.float32)

    @abstractmethod
    def reduce_scatter(self, out: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def all_reduce(self, bucket: torch.Tensor) -> torch.Tensor: ...

    def fence(self) -> None:  # noqa: B027  (most engines need nothing)
        """Sends what other ranks still need from this rank; most engines do so without a call."""

    @abstractmethod
    def close(self) -> None: ...


class TorchEngine(Engine):
    """Backend of torch.distributed. If `direct`, tensors lie in shared memory that the peers map
    (`comm_core.empty`)."""

    def __init__(self, backend: str, rank: int, size: int, store: Path, direct: bool) -> None:
        self.versions = {"torch": torch.__version__}
        self._core: Any = None
        if backend == "comm_core":
            self._core = _import("comm_core")
            self.versions["comm_core"] = dear.__version__
        self._direct = direct
        self._dist = torch.distributed  # the lazy module would cost time in each call
        files = self._dist.FileStore(str(store), size)
        self._dist.init_process_group(
            backend, timeout=timedelta(seconds=60), store=files, rank=rank, world_size=size
        )

    def empty(self, count: int) -> torch.Tensor:
        if self._direct:
            return self._core.empty((count,), dtype=torch.float32)
        return super().empty(count)

    def reduce_scatter(self, out: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
        self._dist.reduce_scatter_tensor(out, bucket)
        return out

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        self._dist.all_gather_into_tensor(out, shard)
        return out

    def all_reduce(self, bucket: torch.Tensor) -> torch.Tensor:
        self._dist.all_reduce(bucket)
        return bucket

    def close(self) -> None:
        self._dist.destroy_process_group()


class MpiEngine(Engine):
    """Collectives of MPI, by mpi4py."""

    def __init__(self) -> None:
        _import("mpi4py")
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        library = MPI.Get_library_version().split(",")[0].strip()
        self.versions = {"mpi": library, "mpi4py": importlib.metadata.version("mpi4py")}

    def reduce_scatter(self, out: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
        self._world.Reduce_scatter_block(bucket.numpy(), out.numpy())
        return out

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        self._world.Allgather(shard.numpy(), out.numpy())
        return out

    def all_reduce(self, bucket: torch.Tensor) -> torch.Tensor:
        self._world.Allreduce(self._mpi.IN_PLACE, bucket.numpy())
        return bucket

    def fence(self) -> None:
        # Open MPI moves a queued message only in its calls: a rank that has its result and sleeps
        # may hold back what a peer waits for.
        self._world.Barrier()

    def close(self) -> None:
        self._mpi.Finalize()


class HorovodEngine(Engine):
    """Horovod over MPI; it allocates the results of reduce-scatter and all-gather."""

    def __init__(self) -> None:
        self._hvd = _import("horovod.torch")
        if not self._hvd.mpi_built():
            raise Unavailable("this Horovod was built without MPI")
        self._hvd.init()
        self.versions = {"horovod": importlib.metadata.version("horovod")}

    def reduce_scatter(self, out: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
        return self._hvd.reducescatter(bucket, op=self._hvd.Sum, name="rs")

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        return self._hvd.allgather(shard, name="ag")

    def all_reduce(self, bucket: torch.Tensor) -> torch.Tensor:
        return self._hvd.allreduce_(bucket, op=self._hvd.Sum, name="ar")

    def close(self) -> None:
        self._hvd.shutdown()


def create(name: str, rank: int, size: int, store: Path) -> Engine:
    """Joins the job of an engine. Raises `Unavailable` if something that the engine needs is not
    installed."""
    if name == "mpi":
        return MpiEngine()
    if name == "horovod":
        return HorovodEngine()
    backend = name.removesuffix("_direct")
    return TorchEngine(backend, rank, size, store, direct=name.endswith("_direct"))


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error
