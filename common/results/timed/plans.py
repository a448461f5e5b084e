"""Description of a plan: the groups of gradients (buckets), the predicted step, and the tuner."""

from __future__ import annotations

from collections.abc import Sequence

from common.results.records import Group, JsonObject, Record

_MIB = 1 << 20
_SHOWN = 12
"""Largest number of groups whose sizes are listed."""


def lines(record: Record) -> list[str]:
    """Returns the title of a trial, and indented lines about its plan."""
    trial, plan = record.trial, record.first and record.first.plan
    title = f"{record.label}: {trial['model']}, batch {trial['batch_size']}, "
    title += f"{trial['world_size']} workers"
    title += f", {trial['network']}" if trial["network"] else ""
    second = _modelled(record)
    if plan is None:
        return [title, "    no plan on record", *second]
    text = [title, *second]
    if plan.groups:
        text.append(f"    {_groups(plan.groups)}")
    if "first_mb" in plan.found:
        text.append(f"    groups grow from {plan.found['first_mb']:.3g} MB at both ends, by costs")
    if "predicted" in plan.found:
        text.append(f"    {_predicted(plan.found['predicted'])}")
    if "tuner" in plan.found:
        text += [f"    {line}" for line in _tuner(plan.found["tuner"])]
    if "partitions" in plan.found:
        text.append(f"    {_queues(plan.found)}")
    return text


def _modelled(record: Record) -> list[str]:
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


def _predicted(predicted: JsonObject) -> str:
    backward_s, end_s = predicted["backward_s"], predicted["ends_s"][-1]
    return (
        f"predicted: all gradients are ready after {1e3 * backward_s:.1f} ms of the backward pass; "
        f"their averages are complete {1e3 * (end_s - backward_s):.1f} ms later"
    )


def _tuner(tuner: JsonObject) -> list[str]:
    names = [name for name in tuner if name.endswith("_mb")]

    def sizes(values: JsonObject) -> str:
        apart = len(names) > 1
        return ", ".join(
            (f"{name.removesuffix('_mb')} " if apart else "") + f"{values[name]:.2f} MB"
            for name in names
        )

    tried = "; ".join(f"{sizes(trial)} {1e3 * trial['step_s']:.1f} ms" for trial in tuner["tried"])
    ended = all(tuner[name] is not None for name in names)
    end = f"{sizes(tuner)} stayed" if ended else "it had not ended"
    return [f"tuner: {tried}", f"tuner: {end}"]


def _queues(findings: JsonObject) -> str:
    credit = findings["credit_mb"]
    return (
        f"{findings['partitions']} partitions in {findings['queues']} queues"
        + ("" if credit is None else f", {credit:.2f} MB under way at most")
        + "; groups in the order of their first start: "
        + " ".join(map(str, list(dict.fromkeys(findings["order"]))[:_SHOWN]))
    )
