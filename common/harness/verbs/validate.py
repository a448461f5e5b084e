"""Verb `validate`: compares predicted steps with measured or published ones; shows the errors.

The costs of collectives come from trials of another model on the same links, if there is one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.harness.verbs import Status
from common.virtual.pool import mapped
from dear.errors import Unavailable, UserError

if TYPE_CHECKING:
    from common.results.records import Record
    from common.results.records.trust import Foreseen
    from common.results.tables.validated import Check
    from common.virtual.costs.parts import Shape
    from common.virtual.setting import Setting
    from dear.cost.event_model.link import Cost

HELP = "compare predictions with measured sweeps, or with published throughputs"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument(
        "sweeps", nargs="*", help="folders of emulated sweeps, or names of sweeps below --logs"
    )
    parser.add_argument(
        "--published",
        type=Path,
        metavar="FILE",
        help="compare with published throughputs: a file with the columns of "
        "configs/published/ddl_benchmarks.csv",
    )
    parser.add_argument("--json", action="store_true", help="print rows and summary as JSON")


def main(options: argparse.Namespace) -> int:
    """Prints a row per trial and a summary; the exit status is 4 if nothing could be compared."""
    from common.harness.output import find_sweep
    from common.results.store import Comparison
    from common.results.tables import validated
    from common.virtual.passes import UnmodelledError

    if (options.published is None) == (not options.sweeps):
        raise UserError("validate needs either sweeps, or --published FILE")
    if options.published is not None:
        return _published(options.published, options.json)
    checks, skipped = [], []
    folders = [find_sweep(name, options.logs) for name in options.sweeps]
    sweeps = [
        [r for r in Comparison.load(folder).results(folder) if _is_measured(r)]
        for folder in folders
    ]
    everything = [record for records in sweeps for record in records]
    slower = {_scaled(record): record for record in everything}
    doubled = {id(double) for record in slower.values() if (double := _double(record, slower))}
    for folder, records in zip(folders, sweeps, strict=True):
        for record in records:
            if id(record) in doubled:
                continue  # a part of the row at half its time scale
            try:
                checks.append(_check(record, _double(record, slower), everything, folder.name))
            except (UserError, UnmodelledError) as error:
                skipped.append(f"{record.id}: {error}")
    if options.json:
        print(json.dumps(validated.as_json(checks, skipped)))
    else:
        print(validated.text(checks, skipped))
    return Status.OK if checks else Status.NO_ANSWER


def _published(path: Path, as_json: bool) -> Status:
    from common.results.tables import published
    from common.virtual.published.comparison import compare
    from common.virtual.published.study import read

    comparison = compare(read(path))
    print(json.dumps(published.as_json(comparison)) if as_json else published.text(comparison))
    return Status.OK if comparison.compared else Status.NO_ANSWER


def _is_measured(record: Record) -> bool:
    from common.results.validity import flag_text

    many = record.ok and record.throughput is not None and record.trial["world_size"] > 1
    emulated = record.fabric.kind == "emulated" and not record.trial.get("learn")
    return many and emulated and record.fault is None and not flag_text(record)


def _scaled(record: Record, factor: float = 1) -> str:
    """Returns the trial without repeats and labels, at a multiple of its time scale, as a key."""
    apart = {"label": None, "measure": None, "time_scale": factor * record.fabric.time_scale}
    return json.dumps({**record.trial, **apart}, sort_keys=True)


def _double(record: Record, records: Mapping[str, Record]) -> Record | None:
    """Returns the record of the same trial at twice its time scale."""
    return records.get(_scaled(record, 2))


def _measured_s(record: Record, double: Record | None) -> tuple[float, str]:
    """Returns the measured step in seconds, extrapolated if possible, and the time scales."""
    scale, step_s = record.fabric.time_scale, record.step_s
    if double is not None:
        at_2k_s = double.step_s
    elif record.systematic is not None:
        at_2k_s = record.systematic.step_2k_s
    else:
        return step_s, f"{scale:g}"
    return 2 * at_2k_s - step_s, f"{scale:g}, {2 * scale:g}"


def keep_predictions(folder: Path, records: Sequence[Record]) -> list[Record]:
    """Predicts the measured trials of a sweep that have no prediction, and keeps it beside them.

    Returns:
        The records with predictions.
    """
    from common.results import store

    todo = [record for record in records if _is_measured(record) and record.foreseen is None]
    if not todo:
        return [*records]
    steps = mapped(_foreseen, [(folder, record.hash) for record in todo])
    new = dict(zip((record.hash for record in todo), steps, strict=True))
    records = [replace(r, foreseen=new[r.hash]) if r.hash in new else r for r in records]
    store.save_foreseen(folder, records)
    return records


def _foreseen(folder: Path, trial: str) -> Foreseen:
    """Predicts the step of a measured trial, given by its hash, in a process of its own."""
    from common.results.records.trust import Foreseen
    from common.results.store import Comparison
    from common.virtual.passes import UnmodelledError
    from common.virtual.training.run import predicted

    records = Comparison.load(folder).results(folder)
    record = next(record for record in records if record.hash == trial)
    try:
        _load(record.trial)
        setting, donor = _setting(record, records)
        step_s, costs_of = predicted(setting).step_s, donor.trial["model"]
    except (UserError, Unavailable, UnmodelledError) as error:
        return Foreseen(reason=str(error))
    return Foreseen(step_s=step_s, costs_of=costs_of)


def _check(record: Record, double: Record | None, others: Sequence[Record], sweep: str) -> Check:
    from common.results.tables.validated import Check
    from common.virtual.costs.parts import COMPUTE
    from common.virtual.setting import shifted
    from common.virtual.training.run import predicted
    from dear.training.algorithm import algorithm_class

    trial = record.trial
    _load(trial)
    measured_s, scales = _measured_s(record, double)
    setting, donor = _setting(record, others)
    error = _cost_error(donor)
    steps = [predicted(shifted(setting, sign * error, sign * COMPUTE)) for sign in (0, -1, 1)]
    times = [step.step_s for step in steps]
    return Check(
        sweep=sweep,
        model=trial["model"],
        batch=trial["batch_size"],
        world_size=trial["world_size"],
        network=trial["network"],
        algorithm=record.label,
        scales=scales,
        measured_s=measured_s,
        predicted_s=times[0],
        low_s=min(times),
        high_s=max(times),
        costs_of=donor.trial["model"],
        exact=algorithm_class(trial["algorithm"]).is_exact(setting.options),
    )


def _load(trial: Mapping[str, Any]) -> None:
    """Loads what a trial needs besides the project: a user's plugin, and a model's profile.

    A record may come from another machine. If it used a modelled profile that this machine does
    not have, the profile is calculated again.
    """
    from common.harness.custom import bring_model
    from common.harness.trial import Trial
    from common.profiling.gpus import choice_in

    gpu = choice_in(trial["model"].partition("@")[2])
    if trial.get("brought") and gpu is not None:
        bring_model(trial["brought"]["source"], trial["batch_size"], trial["sentence_len"], gpu)
    Trial.from_json({**trial})


def _setting(record: Record, others: Sequence[Record]) -> tuple[Setting, Record]:
    """Returns the setting of a trial's prediction, and the trial that has measured its costs."""
    from common.models.registry import profile_of
    from common.virtual.costs.parts import Shape
    from common.virtual.setting import Setting
    from dear.training.algorithm import algorithm_options

    trial, shape = record.trial, _shape(record)
    donor = _donor(record, others, shape)

    def costs(hosts: int, ranks_per_host: int) -> Mapping[str, Cost]:
        group = Shape(hosts=hosts, ranks_per_host=ranks_per_host)
        return _costs(_donor(record, others, group))

    setting = Setting(
        profile=profile_of(trial["model"], trial["batch_size"], trial["sentence_len"]),
        algorithm=trial["algorithm"],
        options=algorithm_options(trial["algorithm"], trial["options"]),
        shape=shape,
        costs=costs,
        engine=trial["backend"],
        optimizer=trial["optimizer"]["name"],
        momentum=trial["optimizer"]["momentum"],
    )
    return setting, donor


def _shape(record: Record) -> Shape:
    from common.virtual.costs.parts import Shape

    ranks = record.trial["world_size"]
    local = min(record.trial.get("ranks_per_host") or 1, ranks)
    return Shape(hosts=ranks // local, ranks_per_host=local)


def _donor(record: Record, others: Sequence[Record], shape: Shape) -> Record:
    """Returns a trial with the costs of a group on the same links, if possible of another model.

    Raises:
        UserError: no trial of so many hosts and ranks has measured costs.
    """
    fitting = [
        other
        for other in others
        if other.first is not None
        and other.first.costs
        and _shape(other) == shape
        and _links(other) == _links(record)
    ]
    if not fitting:
        raise UserError(
            f"no record has the costs of collectives of {shape.ranks} ranks, "
            f"{shape.ranks_per_host} per host"
        )
    foreign = [other for other in fitting if other.trial["model"] != record.trial["model"]]
    if foreign or record not in fitting:
        # The machine's own delays count less at a larger time scale.
        return max(foreign or fitting, key=lambda other: other.fabric.time_scale)
    return record


def _cost_error(donor: Record) -> float:
    """Returns the relative error of the fitted costs of a trial."""
    from common.virtual.costs.parts import COSTS

    assert donor.first is not None
    if donor.first.engine_costs is not None:
        return donor.first.engine_costs.error
    return donor.first.cost_check.residual if donor.first.cost_check is not None else COSTS


def _links(record: Record) -> tuple[object, ...]:
    engine = record.first.engine_costs if record.first is not None else None
    return record.trial["network"], record.trial["backend"], engine and engine.engine


def _costs(record: Record) -> dict[str, Cost]:
    from common.results.timed.event_model import recorded_costs

    assert record.first is not None
    costs = recorded_costs(record.first)
    # No trial measures a broadcast or a reduce. These are halves of an all-reduce, too.
    halves = {"broadcast": "all_gather", "reduce": "reduce_scatter"}
    return costs | {name: costs[like] for name, like in halves.items() if like in costs}
