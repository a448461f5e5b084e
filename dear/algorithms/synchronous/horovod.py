"""Horovod itself."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dear.algorithms.synchronous import _horovod_start as horovod_start
from dear.errors import Unavailable, UserError
from dear.lazy import torch
from dear.options import at_least, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.algorithm import Options as AlgorithmOptions
from dear.training.engine import Engine, distribute, trained_parameters
from dear.training.hooks import at_end_of_backward

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator


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

        All but `compression` and `adasum` are read once, when Horovod starts in this process: a
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

        def __post_init__(self) -> None:
            if self.fusion_threshold_mb is not None:
                at_least("option of horovod 'fusion_threshold_mb'", self.fusion_threshold_mb, 0)
            if self.cycle_time_ms is not None:
                positive("option of horovod 'cycle_time_ms'", self.cycle_time_ms)
            if self.cache_capacity is not None:
                at_least("option of horovod 'cache_capacity'", self.cache_capacity, 0)
            if self.adasum and self.controller != "mpi":
                raise UserError(
                    "option of horovod 'adasum' needs controller='mpi', the only one of its "
                    f"controllers that has it on CPUs, got controller={self.controller!r}"
                )

    # scripts/horovod.sh builds it for CPU tensors only.
    capabilities = Capabilities(consistency="synchronous", devices=("cpu",))
    bound = "wfbp"

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
        if options.adasum and communicator.size & (communicator.size - 1):
            raise UserError(
                f"option of horovod 'adasum': the number of ranks must be a power of 2, got "
                f"{communicator.size}"
            )
        horovod_start.start(communicator, options)
        engine = _HorovodEngine(model, optimizer, communicator, params, options)
        return model, distribute(optimizer, engine)


_counter = itertools.count()


class _HorovodEngine(Engine):
    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        params: list[Parameter],
        options: Horovod.Options,
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
        half = options.compression == "fp16"
        self._horovod = hvd.DistributedOptimizer(
            carrier,
            named_parameters=named,
            compression=hvd.Compression.fp16 if half else hvd.Compression.none,
            gradient_predivide_factor=float(communicator.size) if half else 1.0,
        )
        if options.adasum:
            # Horovod's own Adasum optimizer reduces updates in `step()`; here the user's runs.
            self._horovod.op = hvd.Adasum
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
