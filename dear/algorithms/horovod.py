"""Horovod itself."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dear.algorithm import Algorithm, Capabilities
from dear.algorithm import Options as AlgorithmOptions
from dear.engine import Engine, distribute, trained_parameters
from dear.errors import Unavailable, UserError
from dear.hooks import at_end_of_backward
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.communicator import Communicator


class Horovod(Algorithm):
    """Horovod (Sergeev and Del Balso 2018, arXiv 1802.05799): negotiated, fused all-reduce.

    The real library: its hooks start an all-reduce per gradient, its background thread agrees on
    what is ready everywhere and fuses it.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks (Horovod alone waits in
    `step()`; waiting at the end of the pass lets accumulation and clipping work as in plain torch).
    Bytes move: during the backward pass, once per cycle.
    Cost per step and rank: one all-reduce per fused buffer, and a negotiation per cycle.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(AlgorithmOptions):
        """Which of Horovod's two controllers runs."""

        controller: Literal["gloo", "mpi"] = "gloo"
        """Who negotiates and reduces: Horovod's own Gloo, or MPI (needs mpirun and a build with
        MPI)."""

    capabilities = Capabilities(consistency="synchronous")

    @classmethod
    def unavailable(cls) -> str | None:
        if importlib.util.find_spec("horovod") is not None:
            return None
        note = Path(sys.prefix, "horovod-build-failed.txt")
        reason = note.read_text().strip() if note.exists() else "not installed"
        return f"Horovod is missing ({reason}); build it with `make horovod`"

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        missing = self.unavailable()
        if missing:
            raise Unavailable(missing)
        params = trained_parameters(model, optimizer)
        _start(communicator, options.controller)
        engine = _HorovodEngine(model, optimizer, communicator, params)
        return model, distribute(optimizer, engine)


_counter = itertools.count()


class _HorovodEngine(Engine):
    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        params: list[Parameter],
    ) -> None:
        import horovod.torch as hvd

        super().__init__(model, communicator)
        self._hvd = hvd
        # Horovod insists on a name for everything that the optimizer holds.
        names = {param: name for name, param in model.named_parameters()}
        held = [param for group in optimizer.param_groups for param in group["params"]]
        # Names must differ between optimizers, too: several may be under way at a time.
        self._name = f"optimizer.{next(_counter)}"
        named = [
            (f"{self._name}.{names.get(param, f'outside.{i}')}", param)
            for i, param in enumerate(held)
        ]
        # Horovod makes a new optimizer of the class that it is given, with parameters alone. Only
        # its hooks and its waiting are used, so any class will do; the user's may need arguments.
        carrier = torch.optim.SGD(held, lr=0.0)
        self._horovod = hvd.DistributedOptimizer(carrier, named_parameters=named)
        self._params = params
        self._paused = False
        self._unsent = False
        self._passed = False
        self._in_pass = False
        self.hooks.on_gradient(params, self._on_gradient)

    def step(self, update: Callable[[], Any]) -> Any:
        if not self._passed or self._unsent:
            self._average()
        self._passed = False
        return update()

    def step_closure(self, update: Callable[[Callable[[], Any]], Any], closure: Any) -> Any:
        return update(closure)

    def synchronize(self) -> None:
        """Averages what was accumulated under `no_sync`; the rest `backward()` has averaged."""
        if self._unsent:
            self._average()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        # Horovod counts backward passes per parameter and starts at the last one.
        self._paused, before = True, self._paused
        self._horovod.set_backward_passes_per_step(2**30)
        try:
            yield
        finally:
            self._paused = before
            if not before:
                self._horovod.set_backward_passes_per_step(1)

    def forget(self) -> None:
        self._passed = self._unsent = self._in_pass = False

    def close(self) -> None:
        super().close()
        self._horovod._grad_accs.clear()  # Horovod's hooks live on these nodes

    def _on_gradient(self, param: Parameter) -> None:
        if not param.grad.is_contiguous():  # Horovod takes no channels_last
            param.grad = param.grad.contiguous()
        if self._paused:
            self._unsent = True
        elif not self._in_pass:
            self._in_pass = True
            at_end_of_backward(self._average)

    def _average(self) -> None:
        self._in_pass = self._unsent = False
        self._passed = True
        if self.communicator.size == 1:
            return  # Horovod registers no hooks then
        # Horovod gives every parameter a gradient, zero where there was none. One that no rank
        # used must stay without, or weight decay and momentum would move it.
        used = torch.tensor([param.grad is not None for param in self._params], dtype=torch.int32)
        exchange = self._hvd.allreduce_async_(used, op=self._hvd.Sum, name=f"{self._name}.used")
        self._horovod.synchronize()
        self._hvd.synchronize(exchange)
        for param, somewhere in zip(self._params, used.tolist(), strict=True):
            if not somewhere:
                param.grad = None


def _start(communicator: Communicator, controller: str) -> None:
    """Joins Horovod's own job of the same ranks; does nothing if it is joined already."""
    import horovod.torch as hvd

    from dear import runtime

    if hvd.is_initialized():
        return
    facts = runtime.facts()
    if not facts.one_host and controller == "gloo":
        raise UserError(
            "option of horovod controller='gloo' runs on one host here; start over mpirun with "
            "controller='mpi'"
        )
    if controller == "mpi":
        if facts.launcher != "Open MPI" or not hvd.mpi_built():
            raise UserError(
                "option of horovod controller='mpi' needs mpirun and a Horovod built with MPI "
                f"(started by: {facts.launcher}; built with MPI: {bool(hvd.mpi_built())})"
            )
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "mpi"
    else:
        _rendezvous(communicator, facts)
    hvd.init()
    runtime.at_shutdown(hvd.shutdown)


def _rendezvous(communicator: Communicator, facts: Any) -> None:
    """Does what horovodrun would: a key-value server on rank 0, and the ranks' places."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    from dear import runtime

    port = 0
    if facts.rank == 0:
        server = RendezvousServer()
        port = server.start()
        size = facts.world_size
        server.init([SlotInfo("localhost", r, r, 0, size, size, 1) for r in range(size)])
        runtime.at_shutdown(server.stop)
    port = communicator.broadcast_object(port)
    os.environ.update(
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE="lo",
        HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
        HOROVOD_HOSTNAME="localhost",
        HOROVOD_RANK=str(facts.rank),
        HOROVOD_SIZE=str(facts.world_size),
        HOROVOD_LOCAL_RANK=str(facts.local_rank),
        HOROVOD_LOCAL_SIZE=str(facts.local_world_size),
        HOROVOD_CROSS_RANK="0",
        HOROVOD_CROSS_SIZE="1",
    )
