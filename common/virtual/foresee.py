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
from common.virtual.passes import passes_of, update_s_of
from dear.algorithms.planning import foreseen
from dear.buckets.grouping import Arrived
from dear.cost.event_model.link import Cost
from dear.cost.event_model.passes import Passes, UnmodelledError
from dear.cost.event_model.step import Prediction
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
            the link; queued messages overlap the rest (see `dear.cost.event_model.link`). A cost
            without it occupies the link all the time.
        update_s: seconds of the optimizer's step for all parameters; None: SGD with momentum.

    Raises:
        UnmodelledError: the algorithm does not state the order or the groups of its messages.
        UserError: the algorithm does not exist.
    """
    kind = algorithm_class(algorithm)
    passes = passes_of(profile, update_s_of(profile) if update_s is None else update_s)
    return foreseen(
        kind, options, arrived(passes), passes, costs, world_size, share_on_wire(options)
    )


def arrived(passes: Passes) -> Arrived:
    """Returns the gradients as the rules of grouping (`dear.buckets.grouping`) expect them."""
    gradients = passes.gradients
    return Arrived(
        sizes=[gradient.nbytes for gradient in gradients],
        arrivals_s=[gradient.ready_s for gradient in gradients],
        owners=[gradient.name.rpartition(".")[0] for gradient in gradients],
        end_s=passes.backward_s,
        reads_s=passes.reads_s(),
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
