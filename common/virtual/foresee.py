"""A step that nobody has run: from a layer profile, an algorithm's options and costs.

from common.models.profile import load, path_of
from common.virtual.foresee import foresee, halved
from dear.cost.collectives import table_costs
from dear.training.algorithm import algorithm_options

profile = load(path_of("resnet50", "rtx2080ti-modelled", 64))
costs = halved(table_costs("10gbe", 64))
found = foresee(profile, "dear", algorithm_options("dear", {}), costs, world_size=64)
found.step_s, found.exposed_s  # seconds
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.models.profile import Profile
from common.virtual.link import Cost
from common.virtual.passes import Passes, UnmodelledError, grouped, passes_of, update_s_of
from common.virtual.step import Prediction, predict
from dear.buckets.grouping import Arrived
from dear.cost.fit import AlphaBeta
from dear.training.algorithm import algorithm_class


def foresee(
    profile: Profile,
    algorithm: str,
    options: Any,
    costs: Mapping[str, Cost],
    world_size: int,
    update_s: float | None = None,
) -> Prediction:
    """The steady step of an algorithm on equal ranks, each with a link of its own.

    Args:
        options: of the algorithm (`dear.training.algorithm.algorithm_options`).
        costs: seconds by bytes of the full buffer, by operation. Of one that has `occupancy_s`,
            queued messages overlap the rest (`common.virtual.link`); of others nothing.
        update_s: of the optimizer's step for all parameters; None: SGD with momentum.

    Raises:
        UnmodelledError: the algorithm does not state its order, or its groups.
        UserError: there is no such algorithm.
    """
    kind = algorithm_class(algorithm)
    passes = passes_of(profile, update_s_of(profile) if update_s is None else update_s)
    if kind.traffic(options, world_size, 1) is not None:
        raise UnmodelledError("its ranks average in groups")
    share = share_on_wire(options)
    reduced = costs.get("all_reduce")
    if reduced is None:
        raise UnmodelledError("no cost of all_reduce is known")
    groups = kind.grouping(options, arrived(passes), lambda nbytes: reduced(nbytes * share))
    if groups is None:
        raise UnmodelledError("which gradients travel together is not known before it runs")
    messages = grouped(passes, groups, share)
    return predict(passes, messages, kind.overlap_of(options), costs, world_size)


def arrived(passes: Passes) -> Arrived:
    """The gradients as rules of grouping take them; the owner of each is its module."""
    gradients = passes.gradients
    return Arrived(
        sizes=[gradient.nbytes for gradient in gradients],
        arrivals_s=[gradient.ready_s for gradient in gradients],
        owners=[gradient.name.rpartition(".")[0] for gradient in gradients],
        end_s=passes.backward_s,
    )


def share_on_wire(options: Any) -> float:
    """Bytes on the wire per byte of float32 gradients, by an algorithm's options.

    Raises:
        UnmodelledError: compressing takes work that the model does not know.
    """
    compression = getattr(options, "compression", "none")
    if compression in ("fp16", "bf16"):
        return 0.5
    if compression != "none":
        raise UnmodelledError(f"the work of compressing by {compression} is not modelled")
    return 1.0


def halved(all_reduce: AlphaBeta) -> dict[str, AlphaBeta]:
    """Costs of all three collectives where only the all-reduce's are published: its two halves
    have half of its steps and half of its bytes each."""
    half = AlphaBeta(alpha_s=all_reduce.alpha_s / 2, beta_s_per_byte=all_reduce.beta_s_per_byte / 2)
    return {"all_reduce": all_reduce, "reduce_scatter": half, "all_gather": half}
