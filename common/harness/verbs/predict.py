"""Verb `predict`: computes the steps of an experiment's trials on a virtual cluster of any size.

The files of the algorithms run as in training, on a virtual clock: no bytes move, no time passes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from common.emulation.config import ClusterConfig
from common.harness.experiment_file import CommandLine, find_experiment, load
from common.harness.trial import BASELINE, Trial
from common.harness.verbs import Status
from common.harness.verbs.run import add_cluster, add_custom, add_experiment, cluster_overrides
from common.machine.cgroups import usable_cores
from common.models.registry import profile_of
from dear.cost.fit import AlphaBeta
from dear.errors import Unavailable, UserError
from dear.options import Options, positive

if TYPE_CHECKING:
    from common.results.tables.predicted import PredictedRow
    from common.virtual.link import Cost
    from common.virtual.world.run import Setting

HELP = "predict an experiment on a cluster that you do not have"
EXPERIMENT = "predicted-64"
COSTS, COMPUTE = 0.1, 0.02
"""Relative errors of composed costs, and of compute; they give the range."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    add_experiment(parser, EXPERIMENT)
    group = parser.add_argument_group("cluster (changes the experiment's `cluster`)")
    add_cluster(group)
    group.add_argument("--engine", help="comm_core, gloo, mpi or nccl (default)")
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
    add_custom(parser.add_argument_group("custom models and algorithms"))
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--rows", action="store_true", help="print a row for each trial")
    how.add_argument("--json", action="store_true", help="print the rows as JSON on stdout")


def main(options: argparse.Namespace) -> int:
    """Prints the table of predictions; the exit status is 1 if no trial has one.

    Args:
        options: flags of this verb, or of `run`, which has fewer.
    """
    given = {key: getattr(options, key, None) for key in ("alpha_ms", "beta_ns")}
    if len({value is None for value in given.values()}) > 1:
        raise UserError("--alpha-ms and --beta-ns go together")
    for key, value in given.items():
        positive(f"--{key.replace('_', '-')}", value)
    path = find_experiment(options.experiment or EXPERIMENT)
    keys = {key: getattr(options, key, None) for key in ("engine", "inside")}
    overrides = [f"cluster.{key}={value}" for key, value in keys.items() if value is not None]
    overrides += ["cluster.kind=predicted", *cluster_overrides(options), *options.set]
    with contextlib.redirect_stdout(sys.stderr):
        experiment = load(path, overrides, CommandLine.of(options))
        everything = experiment.trials()

    from common.harness.running import plan
    from common.results.tables.predicted import overview, table_of
    from common.results.tables.table import markdown

    trials = plan.select(everything, options.filter, None, experiment.name)
    cluster = experiment.cluster
    assert cluster is not None, "the overrides have made one"
    fixed = None
    if given["alpha_ms"] is not None and given["beta_ns"] is not None:
        fixed = AlphaBeta(alpha_s=given["alpha_ms"] / 1e3, beta_s_per_byte=given["beta_ns"] / 1e9)
    rows = predictions(trials, experiment.base, cluster, fixed)
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
    else:
        engine = "alpha and beta as given" if fixed else f"engine {_engine(cluster)}"
        title = f"{experiment.name}: predicted, {engine}"
        if getattr(options, "rows", False):
            table_of(rows).print(title)
        else:
            lines = overview(rows, experiment.base)
            print(f"{title}; speed-up over {experiment.base}, with its range\n")
            print(
                markdown(
                    lines, [0 < i < len(lines[0]) - 1 and i != 3 for i in range(len(lines[0]))]
                )
            )
            for note in dict.fromkeys(
                f"{row.algorithm}: {row.reason}" for row in rows if row.reason
            ):
                print(note)
        print(
            f"range: costs of collectives +-{COSTS:.0%} (measured costs: their residual), compute "
            f"+-{COMPUTE:.0%}; how it is computed: docs/prediction.md"
        )
    return Status.OK if any(row.step_s for row in rows) else Status.FAILED


def predictions(
    trials: Sequence[Trial],
    base: str,
    cluster: ClusterConfig,
    fixed: AlphaBeta | None = None,
) -> list[PredictedRow]:
    """Returns the rows of trials in their order, without the single workers.

    Args:
        base: label of the algorithm to which the others are compared.
        fixed: cost of an all-reduce of all ranks; None: costs are measured or composed for the
            network.
    """
    many = [trial for trial in trials if trial.algorithm != BASELINE]
    count = min(usable_cores(), len(many))
    # Forked processes know the plugins and models of the command line.
    with ProcessPoolExecutor(count or 1, multiprocessing.get_context("fork")) as pool:
        rows = list(pool.map(partial(_row, cluster=cluster, fixed=fixed), many))
    bases = {row.place: row.step_s for row in rows if row.algorithm == base}
    return [dataclasses.replace(row, baseline_s=bases.get(row.place)) for row in rows]


def _row(trial: Trial, cluster: ClusterConfig, fixed: AlphaBeta | None) -> PredictedRow:
    from common.results.tables.predicted import PredictedRow
    from common.virtual.costs.parts import Shape
    from common.virtual.passes import UnmodelledError
    from common.virtual.world.run import predicted

    place: dict[str, Any] = {
        "model": trial.model,
        "batch": trial.batch_size,
        "world_size": trial.world_size,
        "network": trial.network,
        "algorithm": trial.label,
    }
    try:
        setting = _setting(trial, cluster, fixed)
        plain = dataclasses.replace(
            setting, algorithm=BASELINE, options=Options(), shape=Shape(hosts=1)
        )
        middle, low, high = (predicted(_varied(setting, sign)) for sign in (0, -1, 1))
    except (UserError, Unavailable, UnmodelledError) as error:
        return PredictedRow(**place, status="unsupported", reason=str(error))
    return PredictedRow(
        **place,
        step_s=middle.step_s,
        step_low_s=min(low.step_s, middle.step_s, high.step_s),
        step_high_s=max(low.step_s, middle.step_s, high.step_s),
        exposed_s=middle.exposed_s,
        compute_s=predicted(plain).step_s,
        messages=middle.messages,
        reason=middle.note,
    )


def _engine(cluster: ClusterConfig) -> str:
    return cluster.engine or "nccl"


def _setting(trial: Trial, cluster: ClusterConfig, fixed: AlphaBeta | None) -> Setting:
    from common.emulation.links.profile import network_profile
    from common.virtual.costs.engines import costs_of, ring_of
    from common.virtual.costs.networks import platform_of
    from common.virtual.costs.parts import Shape
    from common.virtual.world.run import Setting

    engine = _engine(cluster)
    local = min(cluster.ranks_per_host, trial.world_size)
    shape = Shape(hosts=-(-trial.world_size // local), ranks_per_host=local)
    if shape.ranks != trial.world_size:
        raise UserError(
            f"{trial.world_size} workers do not fill hosts of {local} ranks; predictions need "
            "equally many ranks on each host"
        )
    assert trial.network is not None
    name, measured, error = engine, None, COSTS
    if fixed is None:
        inside = cluster.inside or ("pcie4" if engine == "nccl" else None)
        platform = platform_of(trial.network, inside)
        measured = network_profile(trial.network).costs
        if measured is not None and (measured.engine, measured.world_size) == (
            engine,
            shape.ranks,
        ):
            error = max(cost.residual_rms for cost in measured.by_operation().values())
        else:
            measured = None
    else:
        name, shape = "ring", Shape(hosts=trial.world_size)
        platform = ring_of(fixed, shape.ranks)

    def costs(hosts: int, ranks_per_host: int) -> Mapping[str, Cost]:
        composed = costs_of(name, platform, Shape(hosts=hosts, ranks_per_host=ranks_per_host))
        if measured is None or hosts * ranks_per_host != shape.ranks:
            return composed
        return {**composed, **measured.collective_costs()}

    return Setting(
        profile=profile_of(trial.model, trial.batch_size, trial.sentence_len),
        algorithm=trial.algorithm,
        options=trial.options,
        shape=shape,
        costs=costs,
        costs_error=error,
        engine=engine,
        optimizer=trial.optimizer.name,
        momentum=trial.optimizer.momentum,
    )


def _varied(setting: Setting, sign: int) -> Setting:
    """Returns the setting with costs and compute at an end of their ranges (-1 or 1), or not."""
    from common.virtual.link import Scaled
    from common.virtual.world.run import slowest

    jitter = setting.profile.jitter
    spread = jitter.relative_std if jitter is not None else 0.0
    slowdown = (1 + sign * COMPUTE) * slowest(setting.shape.ranks, spread)
    if not sign:
        return dataclasses.replace(setting, slowdown=slowdown)
    factor = 1 + sign * setting.costs_error

    def costs(hosts: int, ranks_per_host: int) -> Mapping[str, Cost]:
        before = setting.costs(hosts, ranks_per_host)
        return {name: Scaled(cost=cost, factor=factor) for name, cost in before.items()}

    return dataclasses.replace(setting, costs=costs, slowdown=slowdown)
