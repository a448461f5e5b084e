"""The real Horovod library, as an algorithm."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from dear.buckets.grouping import MIB, Arrived, Cost, Groups, by_count
from dear.comm.backends import torch_version
from dear.comm.communicator import Communicator
from dear.comm.environment import RankFacts
from dear.comm.rendezvous import master_address
from dear.comm.runtime import address_of, is_loopback
from dear.cost.horovod_sender import HorovodSender
from dear.cost.overlap import Cycles, Unstated
from dear.errors import Unavailable, UserError
from dear.lazy import torch
from dear.options import LATER, MOST_LIBRARY_MB, at_least, only_with, positive
from dear.options import Options as AlgorithmOptions
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica, held
from dear.training.gradients import GradientEngine, gradient_of

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo


class Horovod(Algorithm["Horovod.Options"]):
    """Horovod (Sergeev and Del Balso 2018, arXiv 1802.05799): negotiated, fused all-reduce.

    This runs the library itself. Its hooks start an all-reduce per gradient. Its background thread
    agrees with other ranks on the gradients that are ready everywhere, and fuses them.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks. Horovod itself waits in
    `step()`. Here the end of the pass waits, so that accumulation and clipping work as in plain
    torch.
    Bytes move: during the backward pass, once per cycle.
    Cost per step and rank: one all-reduce per fused buffer, and a negotiation per cycle.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(AlgorithmOptions):
        """Horovod's own settings; None leaves them to its environment variables and defaults.

        Horovod reads the settings from `controller` to `autotune` once, when it starts in this
        process. A later optimizer with other values is refused.
        """

        controller: Literal["gloo", "mpi"] = "gloo"
        """Library that negotiates and reduces: Horovod's own Gloo, or MPI (needs mpirun and a build
        with MPI)."""
        fusion_threshold_mb: float | None = None
        """Size of the fused buffer, in MB of 2^20 bytes; 0: nothing is fused."""
        cycle_time_ms: float | None = None
        """Time between two negotiations, in milliseconds."""
        cache_capacity: int | None = None
        """Size of the cache of negotiations; 0: every tensor is negotiated in every step."""
        autotune: bool = False
        """True: Horovod tunes threshold and cycle time by Bayesian optimisation, unless they are
        given above. This takes hundreds of steps, and Horovod does not report its end."""
        autotune_log: str | None = field(default=None, metadata=LATER)
        """File to which Horovod writes each setting that it tries, with its score (CSV)."""
        autotune_warmup_samples: int | None = field(default=None, metadata=LATER)
        """Number of first samples that are ignored; null: Horovod's default, 3."""
        autotune_steps_per_sample: int | None = field(default=None, metadata=LATER)
        """Number of steps of a sample; null: Horovod's default, 10."""
        autotune_samples: int | None = field(default=None, metadata=LATER)
        """Largest number of samples; null: Horovod's default, 20."""
        compression: Literal["none", "fp16"] = "none"
        """`fp16`: gradients are sent in half precision, divided by the number of ranks."""
        adasum: bool = False
        """True: `p.grad` is the adaptive sum of gradients (Maleki et al. 2020, arXiv 2006.02924),
        not their mean. Needs controller=mpi and a power of 2 as the number of ranks."""
        gradient_predivide_factor: float = 1.0
        """Divisor f of gradients before the sum; the sum is divided by (number of ranks) / f. Not
        with `compression=fp16`, which has its own division."""
        groups: int | None = None
        """Number of groups of gradients, in the order of the parameters. A group is sent when all
        its gradients have arrived, so every rank must use the same parameters in a step. None: no
        groups; Horovod fuses gradients that are ready together."""

        def __post_init__(self) -> None:
            positive("horovod option 'gradient_predivide_factor'", self.gradient_predivide_factor)
            at_least("horovod option 'groups'", self.groups, 1)
            for other in ("compression", "adasum"):
                if self.gradient_predivide_factor != 1 and getattr(self, other) not in (
                    "none",
                    False,
                ):
                    raise UserError(
                        "horovod option 'gradient_predivide_factor' cannot be used with "
                        f"{other}, which has its own division; leave one of them out"
                    )
            given = self.fusion_threshold_mb
            at_least("horovod option 'fusion_threshold_mb'", given, 0, MOST_LIBRARY_MB)
            positive("horovod option 'cycle_time_ms'", self.cycle_time_ms)
            at_least("horovod option 'cache_capacity'", self.cache_capacity, 0)
            for name, least in _AUTOTUNE.items():
                if least is not None:
                    at_least(f"horovod option {name!r}", getattr(self, name), least)
                only_with(self, name, "autotune", [True])
            if self.adasum and self.controller != "mpi":
                raise UserError(
                    "horovod option 'adasum' needs controller='mpi', since only MPI has it on "
                    f"CPUs, got controller={self.controller!r}"
                )

        def slowed(self, factor: float) -> Horovod.Options:
            given = self.cycle_time_ms
            if factor == 1 or (given is None and self.autotune):  # Horovod chooses one
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
            """dtype in which gradients are sent; None: the dtype that they have."""
            return torch.float16 if self.compression == "fp16" else None

        def narrowed(self, gradient: torch.Tensor, size: int) -> torch.Tensor:
            """Returns the gradient in the `wire` dtype, undivided; Horovod divides it later."""
            return gradient.to(self.wire) / size

        def mean(self, total: torch.Tensor, size: int) -> torch.Tensor:
            """Returns the mean over ranks, given the sum of what `narrowed` returns."""
            return total

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"
    candidates = ({"fusion_threshold_mb": 16.0}, {"cycle_time_ms": 5.0})
    unfused: ClassVar[Mapping[str, object]] = {"fusion_threshold_mb": 0.0}

    @classmethod
    def overlap_of(cls, options: Options) -> Unstated:
        """Returns the known rule of Horovod's thread (for cached tensors without groups)."""
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
    def costs_as(cls, options: Options) -> str:
        return f"horovod_{options.controller}"

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        return by_count(len(arrived.sizes), 1)

    @classmethod
    def unavailable(cls) -> str | None:
        spec = importlib.util.find_spec("horovod")
        if spec is not None and spec.origin is not None:
            return _other_torch(Path(spec.origin).with_name("metadata.json"))
        note = Path(sys.prefix, "horovod-build-failed.txt")
        reason = note.read_text(encoding="utf-8").strip() if note.exists() else "not installed"
        return f"Horovod is missing ({reason}); build it with `make horovod`"

    def refuse(self, replica: Replica[Options]) -> None:
        if replica.params[0].is_cuda and not _moves_cuda_tensors():
            raise Unavailable(
                "this Horovod is built for CPU tensors only; `make horovod` builds it for CUDA "
                "tensors, too, if there is an nvcc"
            )
        size = replica.communicator.size
        if replica.options.adasum and size & (size - 1):
            raise UserError(
                f"horovod option 'adasum': the number of ranks must be a power of 2, got {size}"
            )

    def alone(self, options: Options) -> bool:
        return True  # the library runs all the same

    def engine(self, replica: Replica[Options]) -> _HorovodEngine:
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
"""Bytes of the bit vector by which ranks agree on cached tensors in each cycle."""
POLL_PERIOD_S = 50e-6
"""Seconds between two checks whether Horovod is done; Linux hardly sleeps for less."""


class _HorovodEngine(GradientEngine[Horovod.Options]):
    """Engine that waits at the end of a pass for the transfers of Horovod's own hooks."""

    def __init__(self, replica: Replica[Horovod.Options]) -> None:
        import horovod.torch as hvd

        # Horovod waits forever if a rank's pass does not use a parameter with sparse gradients.
        super().__init__(replica, [replica.params])
        self._hvd, options = hvd, self.options
        # Horovod needs a name for each parameter of the optimizer.
        names = {param: name for name, param in self.model.named_parameters()}
        # Names must also differ between optimizers: transfers of several may overlap.
        self._name = f"optimizer.{next(_counter)}"
        named = [
            (f"{self._name}.{names.get(param, f'outside.{i}')}", param)
            for i, param in enumerate(held(self.optimizer))
        ]
        # Horovod makes a new optimizer of the given class, without other arguments. Only its hooks
        # and its waiting are used, so any class will do; the user's class may need arguments.
        carrier = torch.optim.SGD(held(self.optimizer), lr=0.0)
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
        gradient = gradient_of(param)
        if self.communicator.size > 1 and not gradient.is_contiguous():
            # Horovod does not take channels_last; `passed` restores it for torch's fused updates.
            self._laid_out[param], param.grad = gradient, gradient.contiguous()

    def ready(self, unit: int) -> None:
        """Does nothing: Horovod's hooks send each gradient."""

    def drop(self) -> None:
        if self._horovod._handles:  # of a pass that ended with an error
            without = [param for param in self.params if param.grad is None]
            self._horovod.synchronize()  # gives all parameters a gradient
            for param in without:
                param.grad = None

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
        return self.options.wire or self.params[0].dtype

    def _send(self, tensor: torch.Tensor, name: str) -> int:
        """Starts an all-reduce as Horovod's hooks do; returns its handle."""
        op, before = self._horovod.op, 1.0
        if op == self._hvd.Average:
            before = 1.0 / self._horovod.gradient_predivide_factor
        handle: int = self._hvd.allreduce_async_(
            tensor, name=name, op=op, prescale_factor=before, postscale_factor=1.0 / before
        )
        return handle

    def passed(self) -> None:
        if self.communicator.size == 1:
            return  # Horovod registers no hooks then
        for param in self.params:
            if param.grad is not None:  # may be of an earlier pass, without a backward pass now
                self.arrived(param)
        # Horovod gives every parameter a gradient, zero if there was none. A parameter that no rank
        # used must get none, or weight decay and momentum would move it.
        used = torch.tensor([param.grad is not None for param in self.params], dtype=self._dtype)
        name = f"{self._name}.used"
        if self.options.adasum:  # an adaptive sum of flags may be zero
            exchange = self._hvd.allreduce_async_(used, op=self._hvd.Sum, name=name)
        else:  # like a gradient, so that they are fused with the last gradients
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

    def _rest_until(self, handles: Sequence[object]) -> None:
        """Returns when these all-reduces have ended.

        Horovod's own waiting polls and never sleeps. It takes a core from the threads that
        communicate, and counts as compute time of this thread.
        """
        began = self.communicator.clock()
        for handle in handles:
            if isinstance(handle, int):  # otherwise Horovod waits elsewhere, or nothing was sent
                while not self._hvd.poll(handle):
                    self.communicator.pause(POLL_PERIOD_S)
        self.communicator.held_up(began, reported=False)


_VARIABLES = {
    "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "autotune": "HOROVOD_AUTOTUNE",
    "autotune_log": "HOROVOD_AUTOTUNE_LOG",
    "autotune_warmup_samples": "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "autotune_steps_per_sample": "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "autotune_samples": "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
}
_AUTOTUNE = {
    "autotune_log": None,
    "autotune_warmup_samples": 0,
    "autotune_steps_per_sample": 1,
    "autotune_samples": 1,
}
"""Options of Horovod's tuner, with their smallest values."""
_running: dict[str, object] = {}
"""Option values with which Horovod was started in this process."""


def _other_torch(metadata: Path) -> str | None:
    """Returns what is wrong if Horovod was built for another torch: its operations would fail.

    Args:
        metadata: file of Horovod's build, if there is one.
    """
    built = json.loads(metadata.read_text(encoding="utf-8")) if metadata.exists() else {}
    here = torch_version()
    if built.get("pytorch", here) == here:
        return None
    return (
        f"this Horovod was built for torch {built['pytorch']}, but this is torch {here}; rebuild "
        "it with `make horovod`"
    )


def start(communicator: Communicator, options: Horovod.Options) -> None:
    """Starts Horovod's own job of the same ranks, with its settings from `options`.

    Raises:
        UserError: Horovod runs already, with other settings; or controller=mpi is not possible.
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
                "horovod option controller='mpi' needs mpirun and a Horovod built with MPI "
                f"(started by: {facts.launcher}; built with MPI: {bool(hvd.mpi_built())})"
            )
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "mpi"
    else:
        _rendezvous(communicator, facts)
    with _settings(options):
        hvd.init()
    _running.clear()
    _running.update(wanted)
    runtime.at_shutdown(hvd.shutdown)


def _refuse_others(wanted: Mapping[str, object]) -> None:
    import horovod.torch as hvd

    now = _running
    if not now:  # the script has started Horovod
        controller = "mpi" if hvd.mpi_enabled() else "gloo"
        now = {**dict.fromkeys(_VARIABLES), "autotune": False, "controller": controller}
    for name, value in wanted.items():
        if value != now[name]:
            raise UserError(
                f"horovod option {name}={value}: Horovod runs in this process already, with "
                f"{name}={now[name]}, and reads its settings only when it starts"
            )


@contextlib.contextmanager
def _settings(options: Horovod.Options) -> Iterator[None]:
    """Sets the environment variables that Horovod reads at its start; restores them afterwards."""
    values = {}
    for name, variable in _VARIABLES.items():
        value = getattr(options, name)
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
    """Does what horovodrun does: starts a key-value server, and tells each rank its place."""
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
    before = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    runtime.at_shutdown(lambda: _restore(before))
    os.environ.update(
        {f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slots[facts.rank]).items()},
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE=interface,
        HOROVOD_GLOO_RENDEZVOUS_ADDR=address,
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
    )


def _restore(before: Mapping[str, str]) -> None:
    """Restores the launcher's HOROVOD_ variables, because this job's server ends with the job."""
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        del os.environ[name]
    os.environ.update(before)


def _whereabouts(facts: RankFacts) -> tuple[str, str, str]:
    """Returns this host's name, its address for other ranks, and the interface of the address."""
    if facts.one_host:
        return "localhost", "127.0.0.1", "lo"
    name = socket.gethostname()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    address = address_of(interface) if interface else socket.gethostbyname(name)
    loopback = address is not None and is_loopback(address)
    if not interface and loopback and not is_loopback(master_address() or "localhost"):
        raise UserError(
            f"{name} is {address} on its own host, which other hosts cannot reach; correct "
            "/etc/hosts, or set GLOO_SOCKET_IFNAME to the network interface"
        )
    if address is None:
        raise UserError(f"GLOO_SOCKET_IFNAME={interface}: {name} has no such interface with IPv4")
    return name, address, interface


def _slots(places: Sequence[tuple[str, int]]) -> list[SlotInfo]:
    """Returns Horovod's description of the ranks; `places` has host and local rank of each."""
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
