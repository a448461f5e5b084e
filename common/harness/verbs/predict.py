"""Verb `predict`: computes the steps of an experiment's trials on a virtual cluster of any size.

The algorithms' code runs as in training, but on a virtual clock: no bytes move, no time passes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.emulation.config import EMULATED_ONLY, ClusterConfig
from common.harness.experiment import Experiment
from common.harness.experiment_file import NOTHING_RUNS, CommandLine, find_experiment, load
from common.harness.trial import BASELINE, Trial
from common.harness.verbs import Status
from common.harness.verbs.run import add_cluster, add_custom, add_experiment, cluster_overrides
from common.models.profile import Profile
from common.models.registry import profile_of
from common.virtual.costs.engines import ENGINES
from common.virtual.costs.faults import check, disturbances
from common.virtual.costs.known import Links, given_links, links_of
from common.virtual.costs.parts import COMPUTE, COSTS
from common.virtual.pool import mapped
from dear.cost.fit import AlphaBeta
from dear.errors import Unavailable, UserError
from dear.options import positive
from dear.training.algorithm import algorithm_class

if TYPE_CHECKING:
    from common.results.tables.predicted import PredictedRow, ReachRow
    from common.virtual.costs.parts import Shape
    from common.virtual.over import Point
    from common.virtual.setting import Setting

HELP = "predict an experiment on a cluster that you do not have"
EXPERIMENT = "predicted-64"
NO_NETWORK = {"network": None, "network_digest": None}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    add_experiment(parser, EXPERIMENT)
    group = parser.add_argument_group("cluster (changes the experiment's `cluster`)")
    add_cluster(group)
    group.add_argument("--engine", help="nccl (default); without GPU links: comm_core, gloo, mpi")
    group.add_argument("--inside", help="links between the GPUs of a host, e.g. nvlink3")
    group.add_argument(
        "--alpha-ms",
        type=float,
        metavar="MS",
        help="start-up of an all-reduce of all ranks, in place of composed costs",
    )
    group.add_argument(
        "--beta-ns", type=float, metavar="NS", help="with --alpha-ms: time per byte, in ns"
    )
    group.add_argument(
        "--over",
        metavar="AXIS[=V,...]",
        help="predict a series over workers, bandwidth (Gb/s), latency (us), compute (speed of a "
        "GPU / the profile's) or, with --alpha-ms, start_up (ms)",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FOLDER",
        help="draw the speed-ups, or the series of --over, into this folder",
    )
    for name, what in (("trace", "timelines, for Perfetto"), ("chakra", "Chakra execution traces")):
        what = f"write {what} of each trial's predicted steps there"
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=what)
    add_custom(parser.add_argument_group("custom models and algorithms"))
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--rows", action="store_true", help="print a row for each trial")
    how.add_argument("--json", action="store_true", help="print the rows as JSON on stdout")


def engine_overrides(options: argparse.Namespace) -> list[str]:
    """Returns `--engine` and `--inside` as overrides (`key=value`).

    The experiment's links inside a host are between GPUs. `--engine` of an engine that cannot use
    such links replaces them by the engine's own.
    """
    gpu, kind = ENGINES["nccl"], ENGINES.get(options.engine)
    on_cpus = kind is not None and not set(gpu.inside) <= set(kind.inside)
    keys = {"inside": "null"} if on_cpus else {}
    given = {"engine": options.engine, "inside": options.inside}
    keys |= {key: value for key, value in given.items() if value is not None}
    return [f"cluster.{key}={value}" for key, value in keys.items()]


def require_predicted(experiment: Experiment) -> None:
    """Raises `UserError` if `--set` has replaced the predicted cluster."""
    if experiment.cluster is None or experiment.cluster.kind != "predicted":
        raise UserError("cluster: a prediction needs cluster.kind=predicted; leave it out of --set")


def _overrides(options: argparse.Namespace, fixed: bool) -> list[str]:
    """Returns the overrides of the experiment.

    Args:
        fixed: True if the costs are given, so that links have no effect.
    """
    usual = {field.name: field.default for field in dataclasses.fields(ClusterConfig)}
    links = ("cluster.network=", "cluster.inside=", "networks=")
    given = [f"--{flag}" for flag in ("network", "inside") if getattr(options, flag) is not None]
    given += [f"--set {text}" for text in options.set if text.startswith(links)]
    if fixed and given:
        raise UserError(f"{given[0]}: no effect with --alpha-ms, which gives the costs")
    return [
        *engine_overrides(options),
        *(f"cluster.{key}={json.dumps(usual[key])}" for key in EMULATED_ONLY),
        *("cluster.kind=predicted", *NOTHING_RUNS),
        *cluster_overrides(options),
        *options.set,
    ]


def main(options: argparse.Namespace) -> int:
    """Prints the predictions; the exit status is 1 if no trial has one."""
    from common.harness import output

    fixed = _fixed(options.alpha_ms, options.beta_ns)
    series = _series(options.over, fixed)
    folders = options.trace, options.chakra
    output.check_predicted(*folders, series=bool(series))
    path = find_experiment(options.experiment or EXPERIMENT)
    overrides = _overrides(options, fixed is not None)
    with contextlib.redirect_stdout(sys.stderr):
        experiment = load(path, overrides, CommandLine.of(options))
        require_predicted(experiment)
        everything = experiment.trials()
        CommandLine.of(options).print_assumption(experiment)

    from common.harness.running import plan
    from common.results.tables.predicted import overview, reach_text, table_of

    trials = plan.select(everything, options.filter, None, experiment.name)
    if fixed is not None:  # networks of the experiment do not matter
        alike = (json.dumps(trial.to_json() | NO_NETWORK, sort_keys=True) for trial in trials)
        trials = list(dict(zip(alike, trials, strict=True)).values())
    cluster = experiment.cluster
    assert cluster is not None, "the overrides have made one"
    rows = predictions(trials, experiment.base, cluster, fixed, series)
    if options.figure is not None:
        from plots import predicted as figure

        for path in figure.draw(rows, options.figure, experiment.base):
            print(path, file=sys.stderr)
    if any(folders):
        setting_of = partial(_setting, cluster=cluster, fixed=fixed, sign=0)
        output.write_predicted(trials, setting_of, *folders)
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return _status(rows)
    engine = "alpha and beta as given" if fixed else f"engine {_engine(cluster)}"
    title = f"{experiment.name}: predicted, {engine}"
    compared = any(row.algorithm == experiment.base for row in rows)
    if options.rows or not compared:  # without the baseline, there is no speed-up
        table_of(rows).print(title)
    else:
        print(f"{title}; speed-up over {experiment.base}, with its range\n")
        print(overview(rows, experiment.base))
    if series and series[0].axis == "bandwidth":
        print(reach_text(reaches(trials, cluster)))
    print(
        f"range: costs of collectives +-{COSTS:.0%} (measured costs: their residual), compute "
        f"+-{COMPUTE:.0%}; how it is computed: docs/prediction.md"
    )
    return _status(rows)


def _status(rows: Sequence[PredictedRow]) -> Status:
    return Status.OK if any(row.step_s for row in rows) else Status.FAILED


def _fixed(alpha_ms: float | None, beta_ns: float | None) -> AlphaBeta | None:
    if alpha_ms is None and beta_ns is None:
        return None
    if alpha_ms is None or beta_ns is None:
        raise UserError("--alpha-ms and --beta-ns must be given together")
    positive("--alpha-ms", alpha_ms)
    positive("--beta-ns", beta_ns)
    return AlphaBeta(alpha_s=alpha_ms / 1e3, beta_s_per_byte=beta_ns / 1e9)


def _series(text: str | None, fixed: AlphaBeta | None) -> list[Point]:
    from common.virtual.over import points

    series = [] if text is None else points(text)
    if series and (series[0].axis == "start_up") > (fixed is not None):
        raise UserError("--over start_up: goes with --alpha-ms and --beta-ns")
    if series and series[0].axis in ("workers", "bandwidth", "latency") and fixed is not None:
        raise UserError(
            f"--over {series[0].axis}: goes with the costs of a network, not with --alpha-ms"
        )
    return series


def predictions(
    trials: Sequence[Trial],
    base: str,
    cluster: ClusterConfig,
    fixed: AlphaBeta | None = None,
    series: Sequence[Point] = (),
) -> list[PredictedRow]:
    """Returns the rows of trials in their order, without the single workers.

    Args:
        base: label of the algorithm to which the others are compared.
        fixed: cost of an all-reduce of all ranks; None: costs are measured or composed for the
            network.
        series: points at each of which the trials are predicted; empty: as they are.

    Raises:
        UserError: the cluster, or a setting of all trials, cannot be predicted.
    """
    many = [trial for trial in trials if trial.algorithm != BASELINE]
    for trial in many:
        _check(trial)
        if trial.learn and trial.learn.batch_sizes and series and series[0].axis == "workers":
            raise UserError("--over workers: not with learn.batch_sizes, one for each worker")
    for note in notes_of(many, cluster, fixed, series):
        print(note, file=sys.stderr)
    planned = [(trial.to_json(), point) for trial in many for point in series or [None]]
    alike = [(t.model, t.batch_size, t.sentence_len, t.label, t.world_size) for t in many]
    together = [key for key in alike for _ in series or [None]]
    rows = mapped(partial(_row, cluster=cluster, fixed=fixed), planned, together)
    bases = {row.place: row.step_s for row in rows if row.algorithm == base and not row.flag}
    return [dataclasses.replace(row, baseline_s=bases.get(row.place)) for row in rows]


def reaches(trials: Sequence[Trial], cluster: ClusterConfig) -> list[ReachRow]:
    """Returns the bandwidths at which trials reach shares of the speed of compute alone."""
    many = [(trial.to_json(),) for trial in trials if trial.algorithm != BASELINE]
    return mapped(partial(_reach, cluster=cluster), many)


def _reach(planned: Mapping[str, object], cluster: ClusterConfig) -> ReachRow:
    from common.results.tables.predicted import SHARES, ReachRow
    from common.virtual.over import Point, reached
    from common.virtual.passes import UnmodelledError
    from common.virtual.training.run import alone_s, predicted

    trial = Trial.from_json(planned)

    def efficiency(gbps: float) -> float:
        point = Point(axis="bandwidth", value=gbps)
        setting = _setting(trial, cluster, None, 0, point)
        return alone / predicted(setting).step_s

    row = ReachRow(
        model=trial.model,
        batch=_batch(trial),
        workers=trial.world_size,
        network=trial.network,
        fault=trial.fault.title if trial.fault else None,
        algorithm=trial.label,
    )
    try:
        alone = alone_s(_setting(trial, cluster, None, 0, alone=True))
        return dataclasses.replace(row, gbps=reached(efficiency, SHARES))
    except (UserError, Unavailable, UnmodelledError) as error:
        return dataclasses.replace(row, reason=str(error))


def _check(trial: Trial) -> None:
    """Raises `UserError` for a model without layer profile, and for settings not modelled."""
    profile_of(trial.model, trial.batch_size, trial.sentence_len)
    learns = bool(trial.learn and trial.learn.data)
    for key, given in (("dtype", trial.dtype != "float32"), ("learn.data", learns)):
        if given:
            raise UserError(f"{key}: predictions do not model it; leave it out, or use `run`")
    check(trial.fault, timed=trial.learn is not None)


def _row(
    planned: Mapping[str, object],
    point: Point | None,
    cluster: ClusterConfig,
    fixed: AlphaBeta | None,
) -> PredictedRow:
    """Predicts a trial, given as `Trial.to_json()`, in a process of its own."""
    from common.results.tables.predicted import PredictedRow
    from common.virtual.passes import UnmodelledError
    from common.virtual.training.run import alone_s, predicted, stated

    trial = _moved(Trial.from_json(planned), point)  # loads the plugin and the model of the user
    if point is not None and point.axis == "start_up":
        assert fixed is not None, "checked with the flags"
        fixed = dataclasses.replace(fixed, alpha_s=point.value / 1e3)
    place: dict[str, Any] = {
        "point": point,
        "model": trial.model,
        "batch": _batch(trial),
        "world_size": trial.world_size,
        "samples": sum(trial.rank_batches),
        "network": trial.network if fixed is None else None,
        "algorithm": trial.label,
        "kind": trial.algorithm,
        "fault": trial.fault and trial.fault.title,
    }
    try:
        settings = [_setting(trial, cluster, fixed, sign, point) for sign in (0, -1, 1)]
        steps = [predicted(setting) for setting in settings]
    except (UserError, Unavailable, UnmodelledError) as error:
        return PredictedRow(**place, status="unsupported", reason=str(error))
    several, second_s = steps[0].several, None
    if steps[0].note is None and several is None:
        with contextlib.suppress(UnmodelledError):  # the event model cannot compute it
            second_s = stated(settings[0]).step_s
    if several is not None:
        place["samples"] = several.samples(trial.rank_batches)
    return PredictedRow(
        **place,
        step_s=steps[0].step_s,
        step_low_s=min(step.step_s for step in steps),
        step_high_s=max(step.step_s for step in steps),
        exposed_s=steps[0].exposed_s,
        compute_s=alone_s(_setting(trial, cluster, fixed, 0, point, alone=True)),
        event_model_s=second_s,
        messages=steps[0].messages,
        reason=steps[0].note,
        slowest_s=several and several.slowest_s,
        staleness=several and several.staleness,
    )


def _batch(trial: Trial) -> int | str:
    return int(trial.batch) if trial.batch.isdecimal() else trial.batch


def _engine(cluster: ClusterConfig) -> str:
    return cluster.engine or "nccl"


def _sender(trial: Trial, cluster: ClusterConfig) -> str:
    """Returns the engine that sends a trial's messages: that of the cluster, unless the algorithm
    sends by its own library; over NCCL, both are the same.

    Raises:
        UserError: the costs of the algorithm's library are not known.
    """
    engine, kind = _engine(cluster), algorithm_class(trial.algorithm)
    library = kind.sends_by(trial.options)
    if library is None or engine == "nccl":
        return engine
    known = kind.costs_as(trial.options)
    if known not in ENGINES:
        raise UserError(
            f"{trial.algorithm}: what messages of {library} cost is known for engine nccl only"
        )
    return known


def _shape(trial: Trial, cluster: ClusterConfig) -> Shape:
    from common.virtual.costs.parts import Shape

    local = min(cluster.ranks_per_host, trial.world_size)
    if trial.world_size % local:
        raise UserError(
            f"world_sizes: {trial.world_size} workers do not fill hosts of {local} ranks; "
            "predictions need equally many ranks on each host"
        )
    return Shape(hosts=trial.world_size // local, ranks_per_host=local)


def notes_of(
    trials: Sequence[Trial],
    cluster: ClusterConfig,
    fixed: AlphaBeta | None = None,
    series: Sequence[Point] = (),
) -> list[str]:
    """Returns lines about costs that are composed although the network has measured ones.

    Raises:
        UserError: a trial's network or shape cannot be predicted, whatever the point of a series.
    """
    ways = []
    for trial in trials:
        _links(*_way(trial, cluster), cluster, fixed, series[0] if series else None)
        for point in series or [None]:
            with contextlib.suppress(UserError):  # its row says that hosts are not full
                ways.append((*_way(_moved(trial, point), cluster), cluster, fixed, point))
    notes = dict.fromkeys(_links(*way).note for way in dict.fromkeys(ways))
    return [note for note in notes if note is not None]


def _way(trial: Trial, cluster: ClusterConfig) -> tuple[str | None, Shape, str]:
    """Returns the network, the shape and the engine of a trial."""
    return trial.network, _shape(trial, cluster), _sender(trial, cluster)


def _moved(trial: Trial, point: Point | None) -> Trial:
    """Returns the trial with the number of workers of a point."""
    if point is None or point.axis != "workers":
        return trial
    return dataclasses.replace(trial, world_size=int(point.value))


def _links(
    network: str | None,
    shape: Shape,
    engine: str,
    cluster: ClusterConfig,
    fixed: AlphaBeta | None,
    point: Point | None = None,
) -> Links:
    """Returns the costs of the collectives of a trial; raises `UserError` as `links_of`."""
    if fixed is not None:
        return given_links(fixed, shape.ranks)
    assert network is not None, "a cluster has a network"
    axis = None if point is None else point.axis
    changed = point.platform if point is not None and axis in ("bandwidth", "latency") else None
    return links_of(network, shape, engine, cluster.inside, changed, varied=axis == "workers")


@functools.lru_cache(maxsize=32)
def _slowed(profile: Profile, factor: float, speed: float) -> Profile:
    """Returns the profile of a GPU whose compute takes `factor` times as long, if the GPU and its
    memory are `speed` times as fast."""
    slowed = profile.slowed(factor / speed)
    return dataclasses.replace(slowed, memory_bytes_per_s=speed * profile.memory_bytes_per_s)


_known_links = functools.lru_cache(_links)
"""`_links` for a process whose trials share the files of networks."""


def _setting(
    trial: Trial,
    cluster: ClusterConfig,
    fixed: AlphaBeta | None,
    sign: int,
    point: Point | None = None,
    *,
    alone: bool = False,
) -> Setting:
    """Returns a trial's setting; with a `sign` (-1 or 1), at an end of the ranges of its inputs.

    Args:
        alone: the times of compute are those of a worker that waits for no other.
    """
    from common.virtual.setting import Setting
    from common.virtual.training.run import at_own_pace, slowest

    network, shape, engine = _way(trial, cluster)
    links = _known_links(network, shape, engine, cluster, fixed, point)
    profiles = {
        size: profile_of(trial.model, size, trial.sentence_len) for size in set(trial.rank_batches)
    }
    profile = profiles[trial.rank_batches[0]]
    alone = alone or at_own_pace(trial.algorithm, trial.options)
    jitter = 0.0 if alone or profile.jitter is None else profile.jitter.relative_std
    slowdown = (1 + sign * COMPUTE) * slowest(shape.ranks, jitter)
    speed = point.speed if point else 1.0
    slowed = {size: _slowed(profile, slowdown, speed) for size, profile in profiles.items()}
    unequal, factor = len(profiles) > 1, 1 + sign * COSTS
    return Setting(
        profile=slowed[trial.rank_batches[0]],
        rank_profiles=tuple(slowed[size] for size in trial.rank_batches) if unequal else (),
        algorithm=trial.algorithm,
        options=trial.options,
        shape=shape,
        costs=links.within(sign),
        engine=engine,
        optimizer=trial.optimizer.name,
        momentum=trial.optimizer.momentum,
        disturbances=disturbances(trial.fault, engine, shape.hosts, links.platform, factor),
        budget_s=trial.learn and trial.learn.budget_s,
    )


def setting_of(trial: Trial, cluster: ClusterConfig, sign: int, point: Point | None) -> Setting:
    """Returns a trial's setting, as `_setting`; raises `UserError` if nothing can be predicted."""
    _check(trial)
    return _setting(trial, cluster, None, sign, point)
