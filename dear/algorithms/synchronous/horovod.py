"""Horovod itself."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dear.algorithms.synchronous._horovod_sender import HorovodSender
from dear.buckets.grouping import MIB, Arrived, Cost, Groups, by_count
from dear.comm.communicator import Communicator
from dear.comm.environment import RankFacts
from dear.comm.runtime import address_of
from dear.cost.overlap import Cycles, Unstated
from dear.errors import Unavailable, UserError
from dear.lazy import torch
from dear.options import LATER, at_least, positive
from dear.options import Options as AlgorithmOptions
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica
from dear.training.gradients import GradientEngine

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo


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
        """Horovod's own settings; None leaves them to its environment variables and defaults.

        Those from `controller` to `autotune` are read once, when Horovod starts in this process: a
        later wrap with other values is refused.
        """

        controller: Literal["gloo", "mpi"] = "gloo"
        """Who negotiates and reduces: Horovod's own Gloo, or MPI (needs mpirun and a build with
        MPI)."""
        fusion_threshold_mb: float | None = None
        """Size of the fused buffer, in MB of 2^20 bytes; 0: nothing is fused."""
        cycle_time_ms: float | None = None
        """Time between two negotiations, in milliseconds."""
        cache_capacity: int | None = None
        """Responses of negotiations that are kept; 0: every tensor is negotiated in every step."""
        autotune: bool = False
        """Let Horovod look for threshold and cycle time by Bayesian optimisation; those that are
        given above stay. It goes on for hundreds of steps and does not tell when it has ended."""
        compression: Literal["none", "fp16"] = "none"
        """`fp16`: gradients travel in half precision, divided before the sum."""
        adasum: bool = False
        """Adaptive summation (Maleki et al. 2020, arXiv 2006.02924) of gradients instead of their
        mean: `p.grad` is that. Needs controller=mpi, a number of ranks that is a power of 2."""

        gradient_predivide_factor: float = field(default=1.0, metadata=LATER)
        """How the division that makes the mean is shared out: gradients are divided by this before
        the sum, and by the rest after it. `compression=fp16` divides by all of it before."""
        groups: int | None = field(default=None, metadata=LATER)
        """Gradients are sent in so many groups, in the order of the parameters, each when all of it
        is there; every rank must then use the same parameters in a step. None: each by itself,
        fused as they come."""

        def __post_init__(self) -> None:
            positive(
                "option of horovod 'gradient_predivide_factor'", self.gradient_predivide_factor
            )
            at_least("option of horovod 'groups'", self.groups, 1)
            for other in ("compression", "adasum"):
                if self.gradient_predivide_factor != 1 and getattr(self, other) not in (
                    "none",
                    False,
                ):
                    raise UserError(
                        "option of horovod 'gradient_predivide_factor' does not go with "
                        f"{other}, which divides by itself"
                    )
            at_least("option of horovod 'fusion_threshold_mb'", self.fusion_threshold_mb, 0)
            positive("option of horovod 'cycle_time_ms'", self.cycle_time_ms)
            at_least("option of horovod 'cache_capacity'", self.cache_capacity, 0)
            if self.adasum and self.controller != "mpi":
                raise UserError(
                    "option of horovod 'adasum' needs controller='mpi', the only one of its "
                    f"controllers that has it on CPUs, got controller={self.controller!r}"
                )

        def slowed(self, factor: float) -> Horovod.Options:
            given = self.cycle_time_ms
            if factor == 1 or (given is None and self.autotune):  # it looks for one by itself
                return self
            if given is None:
                variable = os.environ.get(_VARIABLES["cycle_time_ms"])
                given = CYCLE_TIME_MS if variable is None else float(variable)
            return dataclasses.replace(self, cycle_time_ms=given * factor)

        @property
        def fusion_bytes(self) -> float:
            given = self.fusion_threshold_mb
            return (FUSION_THRESHOLD_MB if given is None else given) * MIB

        @property
        def wire(self) -> torch.dtype | None:
            """The type in which gradients travel, None if it is their own."""
            return torch.float16 if self.compression == "fp16" else None

        def narrowed(self, gradient: torch.Tensor, size: int) -> torch.Tensor:
            """Horovod divides what it has rounded."""
            return gradient.to(self.wire) / size

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"

    @classmethod
    def overlap_of(cls, options: Options) -> Unstated:
        """The rule of its thread is known for cached tensors that travel one by one."""
        ruled = not (options.autotune or options.adasum or options.groups)
        ruled = ruled and options.cache_capacity != 0 and options.controller == "gloo"
        cycle = options.cycle_time_ms
        return Unstated(
            "Horovod's own thread decides in each cycle what it sends; `backward()` waits for it "
            "all",
            Cycles(
                cycle_s=(CYCLE_TIME_MS if cycle is None else cycle) / 1e3,
                fusion_bytes=options.fusion_bytes,
                agreement_bytes=AGREEMENT_BYTES,
                marks_bytes=4,
            )
            if ruled
            else None,
        )

    @classmethod
    def sends_by(cls, options: Options) -> str:
        return f"Horovod, {options.controller}"

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        return by_count(len(arrived.sizes), 1)

    @classmethod
    def unavailable(cls) -> str | None:
        if importlib.util.find_spec("horovod") is not None:
            return None
        note = Path(sys.prefix, "horovod-build-failed.txt")
        reason = note.read_text().strip() if note.exists() else "not installed"
        return f"Horovod is missing ({reason}); build it with `make horovod`"

    def refuse(self, replica: Replica) -> None:
        if replica.params[0].is_cuda and not _moves_cuda_tensors():
            raise Unavailable(
                "this Horovod is built for CPU tensors; where there is an nvcc, `make horovod` "
                "builds it for CUDA, too"
            )
        size = replica.communicator.size
        if replica.options.adasum and size & (size - 1):
            raise UserError(
                f"option of horovod 'adasum': the number of ranks must be a power of 2, got {size}"
            )

    def alone(self, options: Options) -> bool:
        return True  # the library runs all the same

    def engine(self, replica: Replica) -> _HorovodEngine:
        start(replica.communicator, replica.options)
        return _HorovodEngine(replica)


def _moves_cuda_tensors() -> bool:
    import horovod.torch as hvd

    return bool(hvd.nccl_built())


_counter = itertools.count()
CYCLE_TIME_MS = 1.0
"""Horovod's own default (`cycle_time_ms` in its horovod/common/global_state.h)."""

FUSION_THRESHOLD_MB = 128.0
"""Horovod's own default (horovod/common/global_state.h)."""
AGREEMENT_BYTES = 256
"""Some bits per tensor, by which ranks agree on cached ones in each cycle."""

POLL_PERIOD_S = 50e-6
"""Between two looks whether Horovod is done; a sleep is not much shorter on Linux."""


class _HorovodEngine(GradientEngine):
    """Lets Horovod's own hooks send; what is left are the end of a pass, and accumulation."""

    def __init__(self, replica: Replica) -> None:
        import horovod.torch as hvd

        super().__init__(replica, [replica.params], sparse=True)
        self._hvd, options = hvd, self.options
        # Horovod insists on a name for everything that the optimizer holds.
        names = {param: name for name, param in self.model.named_parameters()}
        # Names must differ between optimizers, too: several may be under way at a time.
        self._name = f"optimizer.{next(_counter)}"
        named = [
            (f"{self._name}.{names.get(param, f'outside.{i}')}", param)
            for i, param in enumerate(self.held)
        ]
        # Horovod makes a new optimizer of the class that it is given, with parameters alone. Only
        # its hooks and its waiting are used, so any class will do; the user's may need arguments.
        carrier = torch.optim.SGD(self.held, lr=0.0)
        half = options.compression == "fp16"
        try:
            self._horovod = hvd.DistributedOptimizer(
                carrier,
                named_parameters=named,
                compression=hvd.Compression.fp16 if half else hvd.Compression.none,
                gradient_predivide_factor=float(self.communicator.size)
                if half
                else options.gradient_predivide_factor,
                groups=options.groups,
            )
        except Exception:
            self.hooks.remove()  # the model stays as it was
            raise
        if options.adasum:
            # Horovod's own Adasum optimizer reduces updates in `step()`; here the user's runs.
            self._horovod.op = hvd.Adasum
        self._paused = False
        self._laid_out: dict[torch.nn.Parameter, torch.Tensor] = {}

    def arrived(self, param: torch.nn.Parameter) -> None:
        if self.communicator.size > 1 and not param.grad.is_contiguous():
            # Horovod takes no channels_last, and torch's fused updates need it again.
            self._laid_out[param], param.grad = param.grad, param.grad.contiguous()

    def ready(self, unit: int) -> None:
        """Horovod has sent each gradient by itself."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        # Horovod counts backward passes per parameter and starts at the last one.
        self._paused, before = True, self._paused
        self._horovod.set_backward_passes_per_step(2**30)
        try:
            with super().no_sync():
                yield
        finally:
            self._paused = before
            if not before:
                self._horovod.set_backward_passes_per_step(1)

    def close(self) -> None:
        super().close()
        self._horovod._grad_accs.clear()  # Horovod's hooks live on these nodes

    def sender(self) -> HorovodSender | None:
        if self.communicator.size == 1:
            return None
        return HorovodSender(
            self.communicator,
            self._send,
            name=Horovod.sends_by(self.options),
            fusion_bytes=self.options.fusion_bytes,
            dtype=self._dtype,
            device=self.params[0].device,
            poll_s=POLL_PERIOD_S,
        )

    @property
    def _dtype(self) -> torch.dtype:
        """In which gradients travel."""
        return self.options.wire or self.params[0].dtype

    def _send(self, tensor: torch.Tensor, name: str) -> Any:
        """Starts an all-reduce as Horovod's hooks start those of gradients."""
        op, before = self._horovod.op, 1.0
        if op == self._hvd.Average:
            before = 1.0 / self._horovod.gradient_predivide_factor
        return self._hvd.allreduce_async_(
            tensor, name=name, op=op, prescale_factor=before, postscale_factor=1.0 / before
        )

    def passed(self) -> None:
        if self.communicator.size == 1:
            return  # Horovod registers no hooks then
        for param in self.params:
            if param.grad is not None:  # of an earlier pass, if this one has no backward
                self.arrived(param)
        # Horovod gives every parameter a gradient, zero where there was none. One that no rank
        # used must stay without, or weight decay and momentum would move it.
        used = torch.tensor([param.grad is not None for param in self.params], dtype=self._dtype)
        name = f"{self._name}.used"
        if self.options.adasum:  # what it makes of marks may be zero
            exchange = self._hvd.allreduce_async_(used, op=self._hvd.Sum, name=name)
        else:  # like a gradient, so that they are fused with those that come last
            exchange = self._send(used, name)
        self._rest_until([handle for handle, _ in self._horovod._handles.values()] + [exchange])
        self._horovod.synchronize()
        self._hvd.synchronize(exchange)
        for param, somewhere in zip(self.params, used.tolist(), strict=True):
            if not somewhere:
                param.grad = None
        for param, gradient in self._laid_out.items():
            if param.grad is not None:
                param.grad = gradient.copy_(param.grad)
        self._laid_out.clear()

    def _rest_until(self, handles: Sequence[Any]) -> None:
        """Returns when these all-reduces have ended.

        Horovod's own waiting asks again and again and never sleeps. It takes a core from the
        threads that communicate, and looks like computing to whoever measures this thread.
        """
        began = self.communicator.clock()
        for handle in handles:
            if isinstance(handle, int):  # else a gradient that waits by itself, or was not sent
                while not self._hvd.poll(handle):
                    self.communicator.pause(POLL_PERIOD_S)
        self.communicator.held_up(began, reported=False)


_VARIABLES = {
    "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "autotune": "HOROVOD_AUTOTUNE",
}
_running: dict[str, Any] = {}
"""The values of options with which Horovod has been started here."""


def start(communicator: Communicator, options: Any) -> None:
    """Joins Horovod's own job of the same ranks, with its settings from `options`.

    Raises:
        UserError: Horovod runs already, with other settings than these.
    """
    import horovod.torch as hvd

    from dear.comm import runtime

    wanted = {name: getattr(options, name) for name in ("controller", *_VARIABLES)}
    if hvd.is_initialized():
        _refuse_others(wanted)
        return
    facts = runtime.facts()
    if options.controller == "mpi":
        if facts.launcher != "Open MPI" or not hvd.mpi_built():
            raise UserError(
                "option of horovod controller='mpi' needs mpirun and a Horovod built with MPI "
                f"(started by: {facts.launcher}; built with MPI: {bool(hvd.mpi_built())})"
            )
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "mpi"
    else:
        _rendezvous(communicator, facts)
    with _settings(wanted):
        hvd.init()
    _running.clear()
    _running.update(wanted)
    runtime.at_shutdown(hvd.shutdown)


def _refuse_others(wanted: dict[str, Any]) -> None:
    import horovod.torch as hvd

    now = _running
    if not now:  # the script has started it itself
        now = {**dict.fromkeys(_VARIABLES), "autotune": False}
        now["controller"] = "mpi" if hvd.mpi_enabled() else "gloo"
    for name, value in wanted.items():
        if value != now[name]:
            raise UserError(
                f"option of horovod {name!r}={value}: Horovod runs in this process already, with "
                f"{name}={now[name]}, and reads its settings only when it starts"
            )


@contextlib.contextmanager
def _settings(wanted: dict[str, Any]) -> Iterator[None]:
    """The environment variables that Horovod reads while it starts; afterwards as they were."""
    values = {}
    for name, variable in _VARIABLES.items():
        value = wanted[name]
        if name == "fusion_threshold_mb" and value is not None:
            value = int(value * MIB)
        if value is not None and value is not False:
            values[variable] = "1" if value is True else str(value)
    before = {variable: os.environ.get(variable) for variable in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for variable in values:
            del os.environ[variable]
        os.environ.update({k: value for k, value in before.items() if value is not None})


def _rendezvous(communicator: Communicator, facts: RankFacts) -> None:
    """Does what horovodrun would: a key-value server on rank 0, and the ranks' places."""
    from horovod.runner.http.http_server import RendezvousServer

    from dear.comm import runtime

    host, address, interface = _whereabouts(facts)
    slots = _slots(communicator.gather_objects((host, facts.local_rank)))
    where = (address, 0)
    if facts.rank == 0:
        server = RendezvousServer()
        where = (address, server.start())
        server.init(slots)
        runtime.at_shutdown(server.stop)
    address, port = communicator.broadcast_object(where)
    os.environ.update(
        {f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slots[facts.rank]).items()},
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE=interface,
        HOROVOD_GLOO_RENDEZVOUS_ADDR=address,
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
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
