"""DeAR: decoupled all-reduce, pipelined with both passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dear.algorithms.synchronous._dear_engine import DearEngine
from dear.algorithms.synchronous._dear_groups import Manner
from dear.buckets.compression import CompressedOptions, refuse_types, wire_name
from dear.buckets.grouping import KIB, MIB
from dear.buckets.run_order import Fusion
from dear.buckets.sharding import element_wise
from dear.errors import UserError
from dear.options import at_least, only_with, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.alone import AloneEngine
from dear.training.engine import distribute, refuse_lbfgs, trained_parameters
from dear.training.regrouping import WATCHED_STEPS, ByWaitTime, Regrouping, tuned, tuning_steps
from dear.training.tuning import TRIALS

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator


class Dear(Algorithm):
    """DeAR (Zhang et al., ICDCS 2023, arXiv 2302.12445).

    An all-reduce is a reduce-scatter and an all-gather. The first half of each group of layers runs
    in the backward pass, the second half in the next forward pass, until the layers need it.
    Invariant: whoever reads parameters by a forward or a state dict sees those after the last
    `step()`; between `backward()` and `step()` `p.grad` is still this rank's own gradient.
    Bytes move: reduce-scatter in the backward pass, all-gather from `step()` into the next forward.
    Cost per step and rank: one reduce-scatter and one all-gather per group, together 2 (P-1)/P of
    the model's bytes, as many as an all-reduce (which groups of a few KB take instead); one
    all-reduce of a byte per parameter.

    Beyond the paper: groups follow the order in which gradients arrive and layers run, as the first
    step shows; and between the halves each rank updates only what it owns, so that the second half
    carries parameters (`update=sharded`). With `exclude_parts` the result is wrong on purpose, but
    the same on all ranks: without `reducescatter` an owner takes its own gradient for the mean,
    without `allgather` nothing is updated.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Which tensors travel together, how compressed, and who updates what.

        With fp16 and bf16 gradients travel so; parameters always travel in their own type. With
        the other compressions the first half gathers payloads, so every rank has everything: the
        second half moves nothing, and updates are replicated.
        """

        fusion: Literal["threshold", "none", "nearby_layers", "wait_time", "tuned"] = "threshold"
        """`threshold`: neighbouring layers up to `threshold_mb`; `none`: every tensor alone;
        `nearby_layers`: so many layers together; `wait_time`: layers whose gradients arrive within
        one `cycle_time_ms`, as measured in the first 5 steps; `tuned`: like `threshold`, which the
        first 52 steps look for (Bayesian optimisation, 1 to 256 MB, 10 trials)."""
        threshold_mb: float = 25.0
        """Size below which layers are joined, in MB of 2^20 bytes; where `tuned` starts."""
        first_mb: float | None = 1.0
        """Groups at both ends of the model, whose transfers nothing hides, begin at this size and
        grow inwards, in MB of 2^20 bytes; null: none is smaller than the others."""
        small_kb: float = 8.0
        """Groups up to this size, in KB of 2^10 bytes, whose cost is that of a message whatever its
        size, are all-reduced in the first half, and have no second; 0: every group has two halves,
        as by default with reduce_broadcast and exclude_parts."""
        nearby_layers: int = 4
        """Layers per group with fusion=nearby_layers; negative: all in one."""
        cycle_time_ms: float = 5.0
        """Length of a cycle with fusion=wait_time, in milliseconds."""
        update: Literal["auto", "sharded", "replicated"] = "auto"
        """`sharded`: each rank updates the part that it owns and sends parameters on; it holds 1/P
        of the optimizer's state. For optimizers that work element by element. `replicated`: every
        rank updates everything. `auto`: sharded where it can be."""
        decouple: Literal["reduce_scatter_all_gather", "reduce_broadcast"] = (
            "reduce_scatter_all_gather"
        )
        """The two halves; groups take turns in who reduces and broadcasts."""
        exclude_parts: tuple[Literal["reducescatter", "allgather"], ...] = ()
        """Leave these out, to see what they cost: training is then wrong."""

        def __post_init__(self) -> None:
            super().__post_init__()
            positive("option of dear 'threshold_mb'", self.threshold_mb)
            if self.first_mb is not None:
                positive("option of dear 'first_mb'", self.first_mb)
            at_least("option of dear 'small_kb'", self.small_kb, 0)
            positive("option of dear 'cycle_time_ms'", self.cycle_time_ms)
            if self.nearby_layers == 0:
                raise UserError("option of dear 'nearby_layers' must not be 0")
            only_with(self, "threshold_mb", "fusion", ["threshold", "tuned"])
            only_with(self, "first_mb", "fusion", ["threshold", "tuned"])
            only_with(self, "nearby_layers", "fusion", ["nearby_layers"])
            only_with(self, "cycle_time_ms", "fusion", ["wait_time"])
            if self.small_kb:
                only_with(self, "small_kb", "decouple", ["reduce_scatter_all_gather"])
                only_with(self, "small_kb", "exclude_parts", [()])
            if self.gathers:
                self._refuse_halves()

        def settling_steps(self) -> int:
            regroups = {"wait_time": WATCHED_STEPS, "tuned": tuning_steps(TRIALS)}
            return max(super().settling_steps(), regroups.get(self.fusion, 0))

        def _refuse_halves(self) -> None:
            for field, usual in (
                ("update", ("auto", "replicated")),
                ("decouple", ("reduce_scatter_all_gather",)),
                ("exclude_parts", ((),)),
                ("small_kb", (0, type(self).small_kb)),
            ):
                value = getattr(self, field)
                if value not in usual:
                    shown = ", ".join(value) if isinstance(value, tuple) else value
                    raise UserError(
                        f"option of dear '{field}'={shown} cannot be had with "
                        f"compression={self.compression!r}, whose payloads are gathered whole in "
                        "the first half; use compression='none', 'fp16' or 'bf16'"
                    )

    capabilities = Capabilities(consistency="synchronous")
    bound = "dear"

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        refuse_lbfgs(optimizer, "dear")
        fusion = Fusion(
            rule="threshold" if options.fusion == "tuned" else options.fusion,
            threshold=options.threshold_mb * MIB,
            first=None if options.first_mb is None else options.first_mb * MIB,
            nearby=options.nearby_layers,
            cycle_s=options.cycle_time_ms / 1000,
        )
        manner = Manner(
            sharded=not options.gathers and _sharded(optimizer, options.update),
            broadcast=options.decouple == "reduce_broadcast",
            wire=wire_name(options.compression),
            payloads=options if options.gathers else None,
            small_bytes=options.small_kb * KIB,
            skip_reduce="reducescatter" in options.exclude_parts,
            skip_gather="allgather" in options.exclude_parts,
        )
        params = trained_parameters(model, optimizer)
        refuse_types(params, options)
        if options.fusion == "tuned":
            regrouping: Regrouping = tuned(fusion, communicator)
        else:
            regrouping = (ByWaitTime if options.fusion == "wait_time" else Regrouping)(fusion)
        if communicator.size == 1 and not options.exclude_parts:
            return model, distribute(optimizer, AloneEngine(model, communicator))
        engine = DearEngine(model, optimizer, communicator, params, manner, regrouping)
        return model, distribute(optimizer, engine)


def _sharded(optimizer: Optimizer, update: str) -> bool:
    able = element_wise(optimizer)
    if update == "sharded" and not able:
        raise UserError(
            f"option of dear 'update': sharded needs an optimizer that works element by element, "
            f"which {type(optimizer).__name__} is not known to do; use update='replicated', or say "
            "`element_wise = True` in its class"
        )
    return able and update != "replicated"
