"""Horovod itself."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dear.algorithm import Algorithm, Capabilities
from dear.algorithm import Options as AlgorithmOptions
from dear.engine import Engine, distribute, trained_parameters
from dear.errors import Unavailable, UserError
from dear.hooks import at_end_of_backward
from dear.interfaces import address_of
from dear.lazy import torch

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.communicator import Communicator
    from dear.environment import RankFacts


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

    # scripts/horovod.sh builds it for CPU tensors only.
    capabilities = Capabilities(consistency="synchronous", devices=("cpu",))

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


def _rendezvous(communicator: Communicator, facts: RankFacts) -> None:
    """Does what horovodrun would: a key-value server on rank 0, and the ranks' places."""
    from horovod.runner.http.http_server import RendezvousServer

    from dear import runtime

    host, address, interface = _whereabouts(facts)
    slots = _slots(communicator.gather_objects((host, facts.local_rank)))
    where = (address, 0)
    if facts.rank == 0:
        server = RendezvousServer()
        where = (address, server.start())
        server.init(slots)
        runtime.at_shutdown(server.stop)
    address, port = communicator.broadcast_object(where)
    slot = slots[facts.rank]
    os.environ.update(
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE=interface,
        HOROVOD_GLOO_RENDEZVOUS_ADDR=address,
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
        HOROVOD_HOSTNAME=slot.hostname,
        HOROVOD_RANK=str(slot.rank),
        HOROVOD_SIZE=str(slot.size),
        HOROVOD_LOCAL_RANK=str(slot.local_rank),
        HOROVOD_LOCAL_SIZE=str(slot.local_size),
        HOROVOD_CROSS_RANK=str(slot.cross_rank),
        HOROVOD_CROSS_SIZE=str(slot.cross_size),
    )


def _whereabouts(facts: RankFacts) -> tuple[str, str, str]:
    """This host's name, its address for the other ranks, and the interface of that address."""
    if facts.one_host:
        return "localhost", "127.0.0.1", "lo"
    name = socket.gethostname()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    address = address_of(interface) if interface else socket.gethostbyname(name)
    if address is None:
        raise UserError(f"GLOO_SOCKET_IFNAME={interface}: {name} has no such interface with IPv4")
    return name, address, interface


def _slots(places: Sequence[tuple[str, int]]) -> list[SlotInfo]:
    """Horovod's view of the ranks, whose hosts and numbers on them are `places`."""
    from horovod.runner.common.util.hosts import SlotInfo

    slots = []
    for rank, (host, local_rank) in enumerate(places):
        alike = [other for other, number in places if number == local_rank]
        slots.append(
            SlotInfo(
                hostname=host,
                rank=rank,
                local_rank=local_rank,
                cross_rank=alike.index(host),
                size=len(places),
                local_size=sum(other == host for other, _ in places),
                cross_size=len(alike),
            )
        )
    return slots
