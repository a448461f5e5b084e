"""What an algorithm has decided by itself, in lines: groups, predictions, and a tuner's trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.results.records import Group, Record

_MIB = 1 << 20
_SHOWN = 12
"""Sizes of more groups are told by their number and range alone."""


def lines(record: Record) -> list[str]:
    """Of one trial: its title, then what is on record of its plan, each a line of its own."""
    trial, plan = record.trial, record.first and record.first.plan
    title = f"{record.label}: {trial['model']}, batch {trial['batch_size']}, "
    title += f"{trial['world_size']} workers"
    title += f", {trial['network']}" if trial["network"] else ""
    second = _modelled(record)
    if plan is None:
        return [title, "    no plan on record", *second]
    found = [title, *second]
    if plan.groups:
        found.append(f"    {_groups(plan.groups)}")
    if "first_mb" in plan.found:
        found.append(f"    groups grow from {plan.found['first_mb']:.3g} MB at both ends, by costs")
    if "predicted" in plan.found:
        found.append(f"    {_predicted(plan.found['predicted'])}")
    if "tuner" in plan.found:
        found += [f"    {line}" for line in _tuner(plan.found["tuner"])]
    if "partitions" in plan.found:
        found.append(f"    {_queues(plan.found)}")
    return found


def _modelled(record: Record) -> list[str]:
    """The second method beside the first, where there are both."""
    model = record.modelled
    if model is None or not record.timed:
        return []
    if model.step_s is None:
        return [f"    event model: not computed: {model.reason}"]
    return [
        f"    event model: {1e3 * model.step_s:.1f} ms a step, of which "
        f"{1e3 * model.exposed_s:.1f} ms wait for communication; measured "
        f"{1e3 * record.step_s:.1f} ms ({model.off(record.step_s):+.1%})"
    ]


def _groups(groups: Sequence[Group]) -> str:
    sizes = [group.bytes / _MIB for group in groups]
    tensors = sum(group.tensors for group in groups)
    text = f"{len(groups)} groups" + (f" of {tensors} tensors" if tensors else "")
    if len(sizes) <= _SHOWN:
        return f"{text}, MB: " + ", ".join(f"{size:.2f}" for size in sizes)
    return f"{text}, {min(sizes):.2f} to {max(sizes):.2f} MB"


def _predicted(predicted: dict[str, Any]) -> str:
    backward_s, end_s = predicted["backward_s"], predicted["ends_s"][-1]
    return (
        f"predicted: gradients are there after {1e3 * backward_s:.1f} ms of the backward pass, "
        f"averaged {1e3 * (end_s - backward_s):.1f} ms later"
    )


def _tuner(tuner: dict[str, Any]) -> list[str]:
    tried = "; ".join(
        f"{one['threshold_mb']:.2f} MB {1e3 * one['step_s']:.1f} ms" for one in tuner["tried"]
    )
    chosen = tuner["threshold_mb"]
    end = "it had not ended" if chosen is None else f"{chosen:.2f} MB stayed"
    return [f"tuner: {tried}", f"tuner: {end}"]


def _queues(found: dict[str, Any]) -> str:
    credit = found["credit_mb"]
    return (
        f"{found['partitions']} partitions in {found['queues']} queues"
        + ("" if credit is None else f", {credit:.2f} MB under way at most")
        + "; groups in the order of their first start: "
        + " ".join(map(str, list(dict.fromkeys(found["order"]))[:_SHOWN]))
    )
