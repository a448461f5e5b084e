"""Prediction of a training step from a layer profile, an algorithm's options, and costs.

from common.models.profile import load, path_of
from common.virtual.foresee import foresee, halved
from dear.cost.collectives import table_costs
from dear.training.algorithm import algorithm_options

profile = load(path_of("resnet50", "rtx2080ti-modelled", 64))
costs = halved(table_costs("10gbe", 64))
prediction = foresee(profile, "dear", algorithm_options("dear", {}), costs, world_size=64)
prediction.step_s, prediction.exposed_s  # seconds
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
    """Predicts a step of an algorithm on equal ranks, each with its own link, after some steps.

    Args:
        options: the algorithm's options (`dear.training.algorithm.algorithm_options`).
        costs: cost by operation. A cost may have an `occupancy_s`, the time for which it occupies
            the link; queued messages overlap the rest (see `common.virtual.link`). A cost without
            it occupies the link all the time.
        update_s: seconds of the optimizer's step for all parameters; None: SGD with momentum.

    Raises:
        UnmodelledError: the algorithm does not state the order or the groups of its messages.
        UserError: the algorithm does not exist.
    """
    kind = algorithm_class(algorithm)
    passes = passes_of(profile, update_s_of(profile) if update_s is None else update_s)
    if kind.traffic(options, world_size, 1) is not None:
        raise UnmodelledError("the algorithm's ranks average in groups")
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
    """Returns the gradients as the rules of grouping (`dear.buckets.grouping`) expect them."""
    gradients = passes.gradients
    return Arrived(
        sizes=[gradient.nbytes for gradient in gradients],
        arrivals_s=[gradient.ready_s for gradient in gradients],
        owners=[gradient.name.rpartition(".")[0] for gradient in gradients],
        end_s=passes.backward_s,
    )


def share_on_wire(options: Any) -> float:
    """Returns the bytes on the wire per byte of float32 gradients.

    Raises:
        UnmodelledError: the options choose a compression whose compute time is not modelled.
    """
    compression = getattr(options, "compression", "none")
    if compression in ("fp16", "bf16"):
        return 0.5
    if compression != "none":
        raise UnmodelledError(f"the compute time of compression {compression} is not modelled")
    return 1.0


def halved(all_reduce: AlphaBeta) -> dict[str, AlphaBeta]:
    """Returns the costs of all three collectives, from the cost of an all-reduce.

    A reduce-scatter and an all-gather each have half of its steps and half of its bytes.
    """
    half = AlphaBeta(alpha_s=all_reduce.alpha_s / 2, beta_s_per_byte=all_reduce.beta_s_per_byte / 2)
    return {"all_reduce": all_reduce, "reduce_scatter": half, "all_gather": half}
