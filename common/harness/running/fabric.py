"""Fabric: the cluster on which a sweep runs.

A fabric is this machine, the hosts of a hostfile, or virtual hosts. Virtual hosts have links of a
chosen speed, run slower than real time by the time scale, and may get faults on purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.emulation.cluster import EmulatedCluster
from common.emulation.dilation import (
    Calibration,
    Choice,
    Load,
    Seen,
    at_hand,
    calibrate,
    choose_time_scale,
    foreign_cores,
    needed_scale,
)
from common.emulation.faults import FaultInjector, blame
from common.emulation.links.profile import network_profile
from common.emulation.measured import (
    counted_between,
    counter_notes,
    measured_network,
    network_record,
)
from common.emulation.trace import TracePlayer
from common.harness.experiment import Experiment
from common.harness.running.record import samples_per_s
from common.harness.trial import Briefing, Trial
from common.launch.hosts import Host, read_hostfile
from common.launch.job import Job, Launcher, Outcome, make_launcher
from common.machine import check_memory, ranks_bytes
from common.machine.cgroups import usable_cores
from common.models.registry import is_replay, model_entry, profile_of
from common.results.records import REAL, FabricFacts, Result
from common.results.records.trust import Network
from dear.errors import UserError

WORKER = "common.harness.worker"
"""Module that every rank runs."""


class Fabric:
    """Cluster of this machine, or of the hosts of a hostfile.

    Runs trials, and describes itself for their records. A context manager: entry builds the
    cluster, and exit removes it.
    """

    preparation = ""
    """Text for the progress line about work before the first launch; empty if there is none."""
    foreign_cores = 0.0
    """Cores that other programs used when the cell began."""

    def __init__(self, experiment: Experiment, trials: Sequence[Trial]) -> None:
        self._launcher = launcher_for(experiment, trials)
        self._launcher.check()

    def __enter__(self) -> Fabric:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def enter_cell(self, trials: Sequence[Trial], settled: Choice | None = None) -> None:
        """Prepares the cluster for the trials of a cell, which share a network.

        Args:
            settled: time scale of the cell's trials that have a record; `trials` need it, too.

        Raises:
            RuntimeError: the cluster cannot be prepared; the message is one line.
        """

    def slow_down(self, choice: Choice) -> None:
        """Changes the time scale of the cell; raises `RuntimeError` like `enter_cell`."""

    def recall(self, trial: Trial, facts: FabricFacts) -> None:
        """Restores facts that an interrupted run has measured in launches of the trial."""

    @property
    def time_scale(self) -> float:
        """Time scale of the running cell."""
        return 1.0

    @property
    def max_time_scale(self) -> float:
        """Largest time scale that may be chosen."""
        return 1.0

    def needed(self, trial: Trial, result: Result) -> Choice | None:
        """Returns the larger time scale that a repeat needs by its measurements, or None.

        Also None if the user gave the time scale, if the model computes, or if a fault lengthens
        steps.
        """
        return None

    def briefing(self, trial: Trial, folder: Path) -> Briefing:
        """Returns facts about the cluster for the workers of the trial in `folder`."""
        return Briefing(folder=folder)

    def run(self, trial: Trial, job: Job) -> Outcome:
        """Runs one repeat of the trial, and returns how it ended."""
        return self._launcher.run(job)

    def describe(self, trial: Trial) -> FabricFacts:
        """Returns the facts about the cluster for the trial's record."""
        # A trial with replayed compute counts as emulated on every cluster.
        return FabricFacts(kind="emulated") if is_replay(trial.model) else REAL


class EmulatedFabric(Fabric):
    """Cluster of virtual hosts on this machine, built once for all trials; needs a sandbox."""

    preparation = "making virtual hosts, measuring this machine and their links"

    def __init__(self, experiment: Experiment, trials: Sequence[Trial]) -> None:
        self._experiment, self._trials, self._config = experiment, trials, experiment.cluster
        self._cluster = EmulatedCluster(
            hosts=max(trial.hosts or 1 for trial in trials),
            profile=network_profile(trials[0].network or experiment.cluster.network),
            networks=[network_profile(name) for name in sorted({t.network for t in trials})],
            links=experiment.cluster.links,
            congestion=experiment.cluster.congestion,
        )
        self._calibration: Calibration | None = None
        self._choice = Choice(time_scale=1.0, reason="")
        self._links = self._cluster.profile
        self._network: dict[tuple[str, float], Network] = {}
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._launches: dict[str, list[dict[str, Any]]] = {}

    def __enter__(self) -> EmulatedFabric:
        slots = self._config.ranks_per_host
        with ExitStack() as stack:
            hosts = [
                Host(name=host.name, slots=slots, address=host.address, virtual=host)
                for host in stack.enter_context(self._cluster).hosts
            ]
            self._check_faults()
            self._launcher = launcher_for(self._experiment, self._trials, hosts)
            stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster.__exit__(*error)

    def enter_cell(self, trials: Sequence[Trial], settled: Choice | None = None) -> None:
        if self._calibration is None:
            self._calibration = calibrate(self._cluster.hosts, self._cluster.links.cpu_s)
        self.foreign_cores = foreign_cores()
        largest = max(trials, key=lambda trial: trial.world_size)
        self._links = network_profile(largest.network)
        self.slow_down(settled or self._choose(largest))

    def slow_down(self, choice: Choice) -> None:
        self._choice, profile = choice, self._links
        self._cluster.set_profile(profile, choice.time_scale)
        key = (profile.name, choice.time_scale)
        if key not in self._network:
            self._network[key] = Network(**measured_network(self._cluster))

    def recall(self, trial: Trial, facts: FabricFacts) -> None:
        self._launches[trial.hash] = [*(facts.network.launches or ())]
        self._events[trial.hash] = [*facts.fault_events]

    @property
    def time_scale(self) -> float:
        return self._choice.time_scale

    @property
    def max_time_scale(self) -> float:
        return self._config.max_time_scale

    def needed(self, trial: Trial, result: Result) -> Choice | None:
        if trial.time_scale is not None or trial.fault is not None or not is_replay(trial.model):
            return None
        strain = result.strain
        seen = Seen(
            time_scale=self.time_scale,
            step_s=sum(trial.rank_batches) / samples_per_s(result, trial),
            cpu_s_per_s=result.cpu_s_per_s,
            core_wait=strain.core_wait and strain.core_wait + strain.steal_cores,
            fell_behind=strain.fell_behind,
            foreign_cores=strain.foreign_cores + strain.steal_cores,
        )
        most = self.max_time_scale
        choice = needed_scale(seen, _load(trial), self._links, _cores(), most)
        return choice if choice.time_scale > self.time_scale else None

    def briefing(self, trial: Trial, folder: Path) -> Briefing:
        alone = self._config.ranks_per_host == 1
        return Briefing(
            folder=folder,
            time_scale=self._choice.time_scale,
            hosts=tuple(host.name for host in self._cluster.hosts[: trial.hosts]),
            ranks_per_host=self._config.ranks_per_host,
            burst_bytes=self._cluster.burst_bytes,
            wire_bytes_per_s=self._cluster.wire_bytes_per_s if alone else None,
            links_pid=self._cluster.links.pid,
        )

    def run(self, trial: Trial, job: Job) -> Outcome:
        before = self._cluster.links.counters()
        outcome, seen = self._traced(trial, job)
        outcome = self._checked(outcome)
        seen |= counted_between(before, self._cluster.links.counters()) or {}
        if seen and outcome.status == "ok":
            others = [c for c in self._launches.get(trial.hash, []) if c["repeat"] != job.repeat]
            self._launches[trial.hash] = [*others, {"repeat": job.repeat, **seen}]
        return outcome

    def _traced(self, trial: Trial, job: Job) -> tuple[Outcome, dict[str, Any]]:
        if not self._links.trace:
            return self._run(trial, job), {}
        with TracePlayer(self._cluster, job.folder, job.repeat) as player:
            outcome = self._run(trial, job)
        if player.error is not None and outcome.status == "ok":
            outcome = Outcome.of("failed", player.error)
        return outcome, {"rate_changes": player.changes}

    def _run(self, trial: Trial, job: Job) -> Outcome:
        if trial.fault is None:
            return super().run(trial, job)
        place = (job.folder, job.repeat, self._choice.time_scale, self._config.ranks_per_host)
        injector = FaultInjector(trial.fault, self._cluster, *place)
        injector.start()
        try:
            outcome = super().run(trial, job)
        finally:
            events = injector.stop()
            # The launch may be a second attempt at the same repeat.
            others = [e for e in self._events.get(trial.hash, []) if e["repeat"] != job.repeat]
            events_here = [{"repeat": job.repeat, **event} for event in events]
            self._events[trial.hash] = others + events_here
        if outcome.status == "ok" and not any(event["ok"] for event in events):
            why = events[0]["message"]
            outcome = Outcome.of("failed", f"the fault did not happen: {why}")
        phrase = blame(outcome.error, events)
        if phrase and outcome.error is not None:
            outcome.error["message"] = f"{outcome.error['message']} ({phrase})"
        return outcome

    def _checked(self, outcome: Outcome) -> Outcome:
        reason = self._cluster.links.broken()
        if reason is None:
            return outcome
        self._cluster.set_profile(self._links, self._choice.time_scale)  # for the next launch
        return Outcome.of("failed", reason)

    def describe(self, trial: Trial) -> FabricFacts:
        measured = self._network.get((trial.network or "", self._choice.time_scale))
        launches = self._launches.get(trial.hash, [])
        if measured is not None and launches:
            lines = [
                f"{trial.label}, repeat {launch['repeat']}: {line}"
                for launch in launches
                for line in counter_notes(launch)
            ]
            notes = [*measured.notes, *lines]
            measured = dataclasses.replace(measured, launches=launches, notes=notes)
        return FabricFacts(
            kind="emulated",
            time_scale=self._choice.time_scale,
            time_scale_reason=self._choice.reason,
            calibration=self._calibration,
            network=measured or Network(**network_record(network_profile(trial.network or ""), [])),
            fault_events=self._events.get(trial.hash, []),
        )

    def _check_faults(self) -> None:
        for trial in self._trials:
            fault = trial.fault
            if fault is not None and fault.kind == "link_delay":
                network = network_profile(trial.network or "")
                if reason := self._cluster.links.refusal(network, fault.delay_us):
                    raise UserError(f"faults: {fault.title}: {reason}")

    def _choose(self, trial: Trial) -> Choice:
        if trial.time_scale is not None:
            return Choice(time_scale=trial.time_scale, reason="given")
        if not is_replay(trial.model):
            return Choice(time_scale=1.0, reason="the model computes for real")
        cores = at_hand(_cores(), self.foreign_cores, trial.world_size)
        choice = choose_time_scale(_load(trial), self._links, self._calibration, cores)
        if cores < _cores():
            others = f"other programs use {self.foreign_cores:.1f} cores"
            choice = dataclasses.replace(choice, reason=f"{choice.reason}; {others}")
        least = self._config.min_time_scale
        if choice.time_scale < least:
            return Choice(time_scale=least, reason="cluster.min_time_scale")
        if choice.time_scale <= self.max_time_scale:
            return choice
        # An estimate is no reason to refuse the trial; later, its measurements may be.
        reason = f"cluster.max_time_scale, though {choice.reason}"
        return Choice(time_scale=self.max_time_scale, reason=reason)


def _load(trial: Trial) -> Load:
    profile = profile_of(trial.model, trial.batch_size, trial.sentence_len)
    return Load(
        world_size=trial.world_size,
        hosts=trial.hosts or 1,
        parameter_bytes=profile.parameter_bytes,
        update_passes=trial.optimizer.update_passes,
        step_s=profile.step_s,
    )


def _cores() -> int:
    return usable_cores()


def make_fabric(experiment: Experiment, trials: Sequence[Trial]) -> Fabric:
    """Returns the fabric of the experiment; virtual hosts need a sandbox."""
    kind = Fabric if experiment.cluster is None else EmulatedFabric
    return kind(experiment, trials)


def check_fit(trials: Sequence[Trial]) -> None:
    """Raises `UserError` if none of the trials fits into this machine's memory."""
    reasons = [misfit(trial) for trial in trials]
    if None not in reasons:
        raise UserError(str(reasons[0]))


def misfit(trial: Trial) -> str | None:
    """Returns why the ranks of a trial on virtual hosts do not fit into memory, or None."""
    if trial.hosts is None or trial.ranks_per_host is None:
        return None
    size, copies = _held(trial)
    try:
        check_memory(
            size, hosts=trial.hosts, ranks_per_host=trial.ranks_per_host, optimizer_copies=copies
        )
    except UserError as error:
        return str(error)
    return None


def memory_bytes(trial: Trial) -> int:
    """Returns the bytes of memory that all ranks of a trial on this machine need together."""
    size, copies = _held(trial)
    return ranks_bytes(size, trial.world_size, copies)


def _held(trial: Trial) -> tuple[int, int]:
    """Returns the bytes of a rank's parameters, and how many more copies of them it holds.

    For a model that computes, only the size of the processes is counted: the size of the model is
    not known before it is built.
    """
    size = 0
    if is_replay(trial.model):
        profile = profile_of(trial.model, trial.batch_size, trial.sentence_len)
        size = profile.parameter_bytes
    # A delayed algorithm holds the gradients of several steps.
    return size, trial.optimizer.state_copies + trial.options.staleness()


def launcher_for(
    experiment: Experiment, trials: Sequence[Trial], hosts: Sequence[Any] | None = None
) -> Launcher:
    """Returns the experiment's launcher for the trials' largest world, on `hosts` if given."""
    world_size = max(trial.world_size for trial in trials)
    if hosts is None and experiment.hostfile is not None:
        hosts = read_hostfile(Path(experiment.hostfile), world_size)
    return make_launcher(
        experiment.launcher,
        hosts=hosts,
        world_size=world_size,
        # The first optimizer imports _dynamo, which is slow; a fork server imports it only once.
        preload=[
            *(WORKER, "torch._dynamo"),
            *sorted({model_entry(trial.model).module for trial in trials}),
        ],
        options=experiment.launcher_options,
    )
