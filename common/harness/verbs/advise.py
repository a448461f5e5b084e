"""Verb `advise`: the fastest algorithm for a model on a cluster, why, and what would change that.

All steps are predicted on the virtual cluster, as by `predict`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.emulation.config import ClusterConfig
from common.harness.experiment import Experiment
from common.harness.experiment_file import CommandLine, find_experiment, load, load_plugins
from common.harness.trial import Trial
from common.harness.verbs import Status
from common.harness.verbs.predict import (
    EXPERIMENT,
    engine_overrides,
    notes_of,
    require_predicted,
    setting_of,
)
from common.harness.verbs.run import add_cluster, add_custom, cluster_overrides
from common.machine.processes import started
from common.models import profile as profiles
from common.models.registry import FILE, names_gpu
from common.paths import COMMAND
from common.virtual.pool import PRELOAD, begin
from dear.errors import Unavailable, UserError
from dear.training.algorithm import (
    algorithm_class,
    algorithm_names,
    algorithm_options,
    plugin_of,
)

if TYPE_CHECKING:
    from common.virtual.advice.causes import Part
    from common.virtual.advice.search import Answer, Axis, Candidate, Question
    from common.virtual.over import Point

HELP = "name the fastest algorithm for a model on a cluster, and why"
FACTORS = (4.0, 16.0)
"""Factors of the bandwidth and of the hosts at which other algorithms are tried, both ways."""
BATCHES = (2.0, 4.0)
"""Factors of the batch, both ways."""
CLUSTER = "examples/clusters/slurm_4x8.yaml"
"""Experiment of a real cluster, for the command that measures there."""
_Variant = dict[str, Any]
"""Algorithm with options, as in an experiment."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    group = parser.add_argument_group("cluster")
    add_cluster(group)
    group.add_argument("--engine", help="nccl (default); without GPU links: comm_core, gloo, mpi")
    group.add_argument("--inside", help="links between the GPUs of a host, e.g. nvlink3")
    add_custom(parser.add_argument_group("model (exactly one) and further algorithms"))
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of the experiment, e.g. optimizer.name=adamw",
    )
    parser.add_argument(
        "--inexact",
        action="store_true",
        help="also list algorithms that change the result of training: with delayed gradients, "
        "decentralized or asynchronous",
    )
    parser.add_argument("--json", action="store_true", help="print the advice as JSON on stdout")


def main(options: argparse.Namespace) -> int:
    """Prints the advice; the exit status is 0."""
    options.experiment = None
    with contextlib.redirect_stdout(sys.stderr):  # for what the user's files print
        asked = _Asked.of(options)

    from common.results.tables import advice as table
    from common.virtual.advice.search import advise

    with started(begin=begin, preload=PRELOAD) as pool:

        def answers(questions: Sequence[Question]) -> list[Answer]:
            with contextlib.redirect_stdout(sys.stderr):
                posed = [asked.posed(question) for question in questions]
            return list(pool.map(partial(_answer, cluster=asked.cluster), posed))

        advice = advise(asked.candidates, asked.base, answers, asked.axes(), asked.unfused)
    use = asked.use(advice.best.candidate)
    if options.json:
        print(json.dumps(table.as_json(advice) | use))
    else:
        print(table.text(advice, asked.title, asked.samples))
        print("\n".join(f"{key}:\n  {text}" for key, text in use.items()))
    return Status.OK


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Posed:
    """Question with all that answers it in another process."""

    trial: Mapping[str, object] | None
    """Trial as JSON; None: `reason` says why there is none."""
    point: Point | None = None
    sign: int = 0
    part: Part | None = None
    reason: str | None = None


def _answer(posed: _Posed, cluster: ClusterConfig) -> Answer:
    from common.virtual.advice.causes import without
    from common.virtual.advice.search import Answer
    from common.virtual.passes import UnmodelledError
    from common.virtual.training.run import predicted

    if posed.trial is None:
        return Answer(step_s=None, note=posed.reason)
    try:
        trial = Trial.from_json(posed.trial)  # loads the plugin and the model of the user
        setting = setting_of(trial, cluster, posed.sign, posed.point)
        step = predicted(without(setting, posed.part) if posed.part else setting)
    except (UserError, Unavailable, UnmodelledError) as error:
        return Answer(step_s=None, note=str(error))
    return Answer(step_s=step.step_s, note=step.note)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """Model and cluster of the user, and the algorithms that are tried."""

    experiment: Experiment
    overrides: Sequence[str]
    command_line: CommandLine
    unfused: Mapping[str, str]
    """Label by algorithm of the variant that sends every gradient alone."""
    given: Sequence[str] = ()
    """Settings of the user, without those of the cluster; printed commands have them, too."""
    _known: dict[int, dict[str, Trial] | str] = dataclasses.field(default_factory=dict)
    """Trials by label, or the reason why there are none, by batch size."""

    @classmethod
    def of(cls, options: argparse.Namespace) -> _Asked:
        """Reads the flags.

        Raises:
            UserError: not exactly one model is named, or nothing can be predicted for it.
        """
        models = len(options.model) + len(options.model_file)
        if models != 1:
            raise UserError(
                f"advise answers for one model, got {models}: name it by --model NAME (of `list`, "
                "hf:TYPE or timm:NAME) or by --model-file FILE"
            )
        load_plugins(options.plugin, Path())
        command_line = dataclasses.replace(CommandLine.of(options), plugins=())
        for text in options.set:
            key = text.partition("=")[0].partition(".")[0]
            if key in ("algorithms", "baseline", "compare_to"):
                raise UserError(
                    f"--set {key}: advise chooses what it compares (--inexact adds algorithms); "
                    f"use `{COMMAND} predict`"
                )
        tried, alone = _variants(options.inexact)
        added = [variant for variant in alone.values() if variant not in tried]
        overrides = [
            *engine_overrides(options),
            *cluster_overrides(options),
            "networks=[]",
            "baseline=false",
            f"algorithms={json.dumps([*tried, *added])}",
            *options.set,
        ]
        experiment = load(find_experiment(EXPERIMENT), overrides, command_line)
        labels = [choice.title for choice in experiment.algorithms]
        require_predicted(experiment)
        variants = [*tried, *added]
        asked = cls(
            experiment=experiment,
            overrides=overrides,
            command_line=command_line,
            unfused={name: labels[variants.index(variant)] for name, variant in alone.items()},
            given=[text for text in options.set if not text.startswith(("cluster", "network"))],
        )
        with contextlib.redirect_stdout(sys.stderr):
            command_line.print_assumption(experiment)
        setting_of(asked.trial, asked.cluster, 0, None)  # refuses what cannot be predicted
        for note in notes_of(asked._own, asked.cluster):
            print(note, file=sys.stderr)
        return asked

    @property
    def cluster(self) -> ClusterConfig:
        assert self.experiment.cluster is not None, "the experiment of predictions has one"
        return self.experiment.cluster

    @property
    def base(self) -> str:
        return self.experiment.base

    @property
    def trial(self) -> Trial:
        """Trial of the base."""
        return next(trial for trial in self._own if trial.label == self.base)

    @functools.cached_property
    def _own(self) -> list[Trial]:
        trials = self.experiment.trials()
        if len(trials) != len(self.experiment.algorithms):
            raise UserError(
                "advise answers for one model, one network and one number of workers; "
                "--set names several"
            )
        return trials

    @property
    def title(self) -> str:
        """Description of the model and the cluster."""
        trial, cluster = self.trial, self.cluster
        engine = cluster.engine or "nccl"
        return (
            f"{trial.model}, batch {trial.batch_size} per worker, {trial.world_size} workers "
            f"({cluster.hosts} hosts x {cluster.ranks_per_host}), {trial.network}, engine {engine}"
            + (f", inside {cluster.inside}" if cluster.inside else "")
        )

    @property
    def samples(self) -> int:
        """Samples of a step, of all workers."""
        return self.trial.batch_size * self.trial.world_size

    @property
    def candidates(self) -> list[Candidate]:
        """Algorithms with the options that are tried."""
        from common.virtual.advice.search import Candidate

        alone = set(self.unfused.values())
        return [
            Candidate(
                label=choice.title,
                algorithm=choice.name,
                options=choice.options,
                exact=_is_exact(choice.name, choice.options),
            )
            for choice in self.experiment.algorithms
            if choice.title not in alone
        ]

    def axes(self) -> list[Axis]:
        """Returns the properties that may change the answer, and the values that are tried."""
        from common.virtual.advice.search import Axis
        from common.virtual.costs.networks import platform_of

        trial, cluster = self.trial, self.cluster
        assert trial.network is not None, "a cluster has a network"
        gbps = platform_of(trial.network).wire("between").bytes_per_s * 8 / 1e9
        hosts = trial.world_size // min(cluster.ranks_per_host, trial.world_size)
        fewer = dict.fromkeys(max(2.0, hosts // factor) for factor in FACTORS)
        batch, model = trial.batch_size, self.command_line.models[0]
        sizes = [max(1.0, batch // f) for f in BATCHES] + [f * batch for f in BATCHES]
        if names_gpu(model):
            sizes = [float(size) for size in profiles.batch_sizes().get(model, ())]
        axes = [
            Axis(
                name="hosts",
                start=hosts,
                lower=tuple(value for value in fewer if value < hosts),
                higher=tuple(hosts * factor for factor in FACTORS),
                whole=True,
            ),
            Axis(
                name="batch",
                start=batch,
                lower=tuple(sorted({size for size in sizes if size < batch}, reverse=True)),
                higher=tuple(sorted({size for size in sizes if size > batch})),
                refined=False,
            ),
        ]
        if hosts > 1:
            bandwidth = Axis(
                name="bandwidth",
                start=gbps,
                lower=tuple(gbps / factor for factor in FACTORS),
                higher=tuple(gbps * factor for factor in FACTORS),
            )
            axes.insert(0, bandwidth)
        return axes

    def posed(self, question: Question) -> _Posed:
        """Returns a question with its trial."""
        from common.virtual.over import Point

        place = question.place
        batch = int(place.value) if place is not None and place.axis == "batch" else None
        trials = self._trials(batch)
        if isinstance(trials, str):
            return _Posed(trial=None, reason=trials)
        trial, point = trials[question.label], None
        if place is not None and place.axis == "bandwidth":
            point = Point(axis="bandwidth", value=place.value)
        if place is not None and place.axis == "hosts":
            workers = int(place.value) * self.cluster.ranks_per_host
            trial = dataclasses.replace(trial, world_size=workers)
            point = Point(axis="workers", value=workers)
        return _Posed(trial=trial.to_json(), point=point, sign=question.sign, part=question.part)

    def _trials(self, batch: int | None) -> dict[str, Trial] | str:
        """Returns the trials by label with another batch size, or why there are none."""
        if batch is None:
            return {trial.label: trial for trial in self._own}
        if batch not in self._known:
            line = dataclasses.replace(self.command_line, batch_size=batch)
            try:
                trials = load(find_experiment(EXPERIMENT), self.overrides, line).trials()
                if any(trial.batch_size != batch for trial in trials):
                    raise UserError("--set models.0.batch_size: use --batch, which may be varied")
                self._known[batch] = {trial.label: trial for trial in trials}
            except UserError as error:
                self._known[batch] = str(error)
        return self._known[batch]

    def use(self, candidate: Candidate) -> dict[str, str]:
        """Returns how to use a candidate, and how to measure it."""
        from common.harness.running.fabric import misfit

        words = {"algorithm": candidate.algorithm, **candidate.options}
        quoted = {key: json.dumps(v) if isinstance(v, str) else v for key, v in words.items()}
        chosen = ", ".join(f"{key}={value}" for key, value in quoted.items())
        trial, cluster, line = self.trial, self.cluster, self.command_line
        compared: list[object] = [self.base]
        if candidate.label != self.base:
            compared.append({"name": candidate.algorithm, "options": dict(candidate.options)})
        name = line.models[0].removeprefix(FILE)
        model = ["--model" if name == line.models[0] else "--model-file", name]
        size = ["--batch", str(trial.batch_size)]
        plugin = plugin_of(candidate.algorithm)
        same = ["--plugin", plugin.path] if plugin else []
        same += ["--set", f"algorithms={json.dumps(compared)}"]
        same += [word for text in self.given for word in ("--set", text)]
        local = cluster.ranks_per_host
        keys = (
            f"world_sizes=[{trial.world_size}]",
            *(f"launcher_options.{kind}_per_node={local}" for kind in ("tasks", "gpus")),
        )
        there = [model[0], name.partition("@")[0] if names_gpu(line.models[0]) else name, *size]
        there += [word for key in keys for word in ("--set", key)]
        use = {
            "use": f"optimizer = dear.DistributedOptimizer(optimizer, model, {chosen})",
            "measure": f"{COMMAND} run {shlex.join([CLUSTER, *there, *same])}",
        }
        if misfit(trial) is None:
            here = [*model, *size, *(["--gpu", line.gpu] if line.gpu else [])]
            here += ["--hosts", str(cluster.hosts), "--ranks-per-host", str(local)]
            here += ["--network", str(trial.network)]
            use["emulate"] = f"{COMMAND} run {shlex.join([*here, *same])}"
        return use


def _is_exact(name: str, options: Mapping[str, object]) -> bool:
    return algorithm_class(name).is_exact(algorithm_options(name, options))


def _variants(inexact: bool) -> tuple[list[_Variant], dict[str, _Variant]]:
    """Returns the algorithms with the options to try, and by algorithm those that fuse nothing."""
    tried: list[_Variant] = []
    alone: dict[str, _Variant] = {}
    for name in algorithm_names():
        kind = algorithm_class(name)
        if kind.candidates is None:
            continue
        options = [given for given in ({}, *kind.candidates) if inexact or _is_exact(name, given)]
        tried += [{"name": name, "options": dict(given)} for given in options]
        if options and kind.unfused is not None:
            alone[name] = {"name": name, "options": dict(kind.unfused)}
    return tried, alone
