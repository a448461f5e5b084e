"""Step time by the event model, from the layer profile, messages and costs of a trial.

The event model and the emulation share no code, so an error in one of them shows as a difference.
"""

from __future__ import annotations

from pathlib import Path

from common.models.profile import load, path_of
from common.results.records import JsonObject, Record, Result
from common.results.records.trust import Modelled, sending_costs
from common.virtual.foresee import share_on_wire
from common.virtual.passes import Bundle, Passes, UnmodelledError, messages_of, passes_of
from dear.cost.event_model.link import Cost, Pairwise
from dear.cost.event_model.step import FUSED, Prediction, predict
from dear.errors import UserError
from dear.training.algorithm import algorithm_class, algorithm_options


def modelled(record: Record) -> Modelled | None:
    """Returns the step by the event model; None for a trial that the model does not cover. The
    model covers trials with timed steps that are emulated, with a synchronous algorithm and several
    ranks on equal devices."""
    if record.fabric.kind != "emulated" or not record.ok or record.throughput is None:
        return None
    trial = record.trial
    if trial["world_size"] == 1 or trial.get("learn") or trial["twin"]:
        return None
    try:
        kind = algorithm_class(trial["algorithm"])
    except UserError as error:
        return Modelled(reason=str(error))
    if kind.capabilities.consistency != "synchronous":
        return None
    try:
        predicted = prediction(record)
    except (UnmodelledError, UserError) as error:
        return Modelled(reason=str(error))
    return Modelled(step_s=predicted.step_s, exposed_s=predicted.exposed_s)


def prediction(record: Record) -> Prediction:
    """Returns the step of a trial by the event model. Raises `UnmodelledError` if the record lacks
    data, or the model does not cover the trial. Raises `UserError` if the algorithm or an option
    does not exist any more."""
    trial, result = record.trial, record.first
    if record.fault is not None:
        raise UnmodelledError("the trial injects faults into its cluster")
    if result is None or result.compute is None or not result.costs:
        raise UnmodelledError("times of compute or costs of collectives are not on record")
    kind = algorithm_class(trial["algorithm"])
    options = algorithm_options(trial["algorithm"], trial["options"])
    # The costs of collectives contain that ranks of one host share its link.
    local_size = trial.get("ranks_per_host") or 1
    engine_costs, plan = result.engine_costs, result.plan
    in_groups = kind.traffic(options, trial["world_size"], local_size) is not None
    if in_groups and engine_costs is None:
        raise UnmodelledError("the ranks average in groups, whose costs are not on record")
    if plan is None or not plan.groups:
        raise UnmodelledError("the messages of a step are not on record")
    passes = trial_passes(trial, result.compute.update_s)
    bundles = [
        Bundle(
            nbytes=group.bytes,
            tensors=group.tensors,
            names=tuple(name for name in (group.first, group.last) if name is not None),
            some=group.some,
        )
        for group in plan.groups
    ]
    messages = messages_of(passes, bundles, share_on_wire(options))
    statement = kind.overlap_of(options)
    engine = kind.sends_by(options)
    if engine is not None and (engine_costs is None or engine_costs.engine != engine):
        raise UnmodelledError(f"the algorithm sends by {engine}, whose costs are not on record")
    return predict(passes, messages, statement, recorded_costs(result), trial["world_size"])


def trial_passes(trial: JsonObject, update_s: float) -> Passes:
    """Returns the passes of a trial's profile, with an update that took `update_s` seconds. `trial`
    has the settings of the trial, as in its record. Raises `UnmodelledError` if the trial's model
    has no layer profile for float32, or its file is missing."""
    model, _, device = trial["model"].rpartition("@")
    if not model:
        raise UnmodelledError("the trial's model has no layer profile")
    if trial["dtype"] != "float32":
        raise UnmodelledError(f"the trial's dtype is {trial['dtype']}, not float32")
    brought = (trial.get("brought") or {}).get("profile")
    path = path_of(model, device, trial["batch_size"]) if brought is None else Path(brought)
    try:
        profile = load(path)
    except UserError:
        raise UnmodelledError("the file of the trial's layer profile is missing") from None
    if profile.digest != trial.get("profile_digest"):
        raise UnmodelledError("the file of the layer profile has changed since the trial")
    return passes_of(profile, update_s)


def recorded_costs(result: Result) -> dict[str, Cost]:
    """Returns the cost by operation of the library that sends, as a trial has measured it."""
    engine = result.engine_costs
    costs: dict[str, Cost] = {**(sending_costs(result.costs, engine) or {})}
    if engine is not None and engine.fused is not None:
        costs[FUSED] = engine.fused
    if engine is not None and engine.pair is not None:
        costs["all_reduce"] = Pairwise(alone=engine.all_reduce, pair=engine.pair)
    return costs
