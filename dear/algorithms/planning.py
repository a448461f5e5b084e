"""Predictions of steps and plans of groups, from the passes of a model that were measured."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from dear.buckets.grouping import Arrived, Cost, Groups, greedy, layers
from dear.cost.event_model.passes import Passes, UnmodelledError, grouped
from dear.cost.event_model.planning import Legs, planned
from dear.cost.event_model.step import Prediction, predict
from dear.cost.fit import OnWire
from dear.lazy import torch
from dear.training.algorithm import Algorithm
from dear.training.hooks import ReaderMap
from dear.training.tuning import BackwardProfile


def measured_pass(
    model: torch.nn.Module,
    params: Sequence[torch.nn.Parameter],
    readers: ReaderMap,
    profile: BackwardProfile,
) -> Arrived:
    """Returns the gradients in the order of arrival, from a profile with timed modules.

    Args:
        readers: modules that read `params`; its groups are replaced.
    """
    readers.set_groups([[param] for param in params])
    reads_s = [profile.forward_s] * len(params)
    for module, at_s in [(model, 0.0), *profile.entered_s.items()]:
        for index in readers.groups_of(module):
            reads_s[index] = min(reads_s[index], at_s)
    for index in readers.unread():
        reads_s[index] = 0.0  # `step()` waits for them
    owner = {param: i for i, layer in enumerate(layers(model, params)) for param in layer}
    return Arrived(
        sizes=[params[i].nbytes for i in profile.order],
        arrivals_s=profile.arrivals_s,
        owners=[owner[params[i]] for i in profile.order],
        end_s=max(profile.backward_s, *profile.arrivals_s),
        reads_s=[reads_s[i] for i in profile.order],
    )


def passes_of(arrived: Arrived, forward_s: float = 0.0, update_s: float = 0.0) -> Passes:
    """Returns the passes of gradients whose `reads_s` are known.

    Args:
        forward_s: duration of the forward pass, at least until the last read.
        update_s: seconds of the optimizer's step for all parameters.
    """
    return Passes.of(
        arrived.sizes,
        arrived.arrivals_s,
        arrived.reads_s,
        forward_s=forward_s,
        backward_s=arrived.end_s,
        update_s=update_s,
    )


def best_groups(
    arrived: Arrived,
    legs: Legs,
    average: Cost,
    known: Sequence[Groups],
    kinds: Sequence[Hashable] | None = None,
) -> Groups:
    """Returns the groups with the shortest step, which are as good as those of any other rule.

    Args:
        legs: costs of a group's messages.
        average: cost of an all-reduce of a group's gradients.
        known: groups of other rules. They may mix dtypes; then they are not considered.
        kinds: dtype and device of each gradient; None: all have the same.
    """
    costs = [cost for cost in (average, legs.first) if cost is not None]
    merged = [greedy(arrived.sizes, arrived.arrivals_s, cost, kinds=kinds) for cost in costs]
    if len(set(kinds or [None])) == 1:
        merged += known
    return planned(passes_of(arrived), legs, merged, kinds)


def foreseen(
    kind: type[Algorithm[Any]],
    options: Any,
    arrived: Arrived,
    passes: Passes,
    costs: Mapping[str, Cost],
    world_size: int,
    share: float = 1.0,
) -> Prediction:
    """Predicts a step of an algorithm on equal ranks, each with its own link, after some steps.

    Args:
        arrived, passes: the same gradients.
        costs: cost by operation; it may have an `occupancy_s`, see `dear.cost.fit.occupancy_s`.
        share: bytes on the wire per byte of gradients.

    Raises:
        UnmodelledError: the algorithm does not state the order or the groups of its messages.
    """
    if kind.traffic(options, world_size, 1) is not None:
        raise UnmodelledError("the algorithm's ranks average in groups")
    reduced = costs.get("all_reduce")
    if reduced is None:
        raise UnmodelledError("no cost of all_reduce is known")
    groups = kind.grouping(options, arrived, OnWire(cost=reduced, share=share))
    if groups is None:
        raise UnmodelledError("which gradients travel together is not known before it runs")
    messages = grouped(passes, groups, share)
    return predict(passes, messages, kind.overlap_of(options), costs, world_size)
