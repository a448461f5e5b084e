"""A sweep on virtual hosts: links shaped and measured, time dilated, faults injected."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.emulation.cluster import EmulatedCluster, network_record
from common.emulation.config import Fault, network_profile
from common.emulation.dilation import Calibration, Choice, Load, calibrate, choose_time_scale
from common.emulation.faults import FaultInjector, blame
from common.harness.experiment import Experiment
from common.harness.fabric import Fabric, launcher_for
from common.harness.settings import EmulationSettings
from common.harness.trial import Trial
from common.launch.hosts import Host
from common.launch.job import Job, Launcher, Outcome
from common.models.registry import is_replay, profile_of


class EmulatedFabric(Fabric):
    """Virtual hosts of this machine, built once for all trials; only inside a sandbox."""

    def __init__(self, experiment: Experiment, trials: Sequence[Trial]) -> None:
        assert experiment.cluster is not None
        self._experiment, self._trials, self._config = experiment, trials, experiment.cluster
        self._cluster = EmulatedCluster(
            hosts=max(trial.hosts or 1 for trial in trials),
            profile=network_profile(experiment.cluster.network),
        )
        self._launcher: Launcher | None = None
        self._calibration: Calibration | None = None
        self._choice = Choice(time_scale=1.0, reason="")
        self._network: dict[tuple[str, float], dict[str, Any]] = {}
        self._events: dict[str, list[dict[str, Any]]] = {}

    def __enter__(self) -> EmulatedFabric:
        self._cluster.__enter__()
        try:
            hosts = [
                Host(
                    name=host.name,
                    slots=self._config.ranks_per_host,
                    address=host.address,
                    virtual=host,
                )
                for host in self._cluster.hosts
            ]
            self._launcher = launcher_for(self._experiment, self._trials, hosts)
        except BaseException:
            self._cluster.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster.__exit__(*error)

    def command(self, job: Job) -> str:
        assert self._launcher is not None
        return self._launcher.command(job)

    def enter_cell(self, trials: Sequence[Trial]) -> None:
        largest = max(trials, key=lambda trial: trial.world_size)
        assert largest.network is not None
        profile = network_profile(largest.network)
        self._choice = self._choose(largest)
        self._cluster.set_profile(profile, self._choice.time_scale)
        key = (profile.name, self._choice.time_scale)
        if key not in self._network:
            found = network_record(profile, self._cluster.measure())
            self._network[key] = found | {"notes": [*self._cluster.notes, *found["notes"]]}

    def settings(self, trial: Trial, folder: Path) -> EmulationSettings:
        return EmulationSettings(
            folder=folder,
            time_scale=self._choice.time_scale,
            hosts=tuple(host.name for host in self._cluster.hosts[: trial.hosts]),
            ranks_per_host=self._config.ranks_per_host,
        )

    def run(self, trial: Trial, job: Job) -> Outcome:
        assert self._launcher is not None
        if trial.fault is None:
            return self._launcher.run(job)
        injector = FaultInjector(
            Fault(**trial.fault),
            self._cluster,
            job.folder,
            job.repeat,
            self._choice.time_scale,
            trial.world_size,
            self._config.ranks_per_host,
        )
        injector.start()
        try:
            outcome = self._launcher.run(job)
        finally:
            events = injector.stop()
            self._events.setdefault(trial.hash, []).extend(
                {"repeat": job.repeat, **event} for event in events
            )
        phrase = blame(outcome.error, events)
        if phrase and outcome.error is not None:
            outcome.error["message"] = f"{outcome.error['message']} ({phrase})"
        return outcome

    def describe(self, trial: Trial) -> dict[str, Any]:
        return {
            "fabric": "emulated",
            "time_scale": self._choice.time_scale,
            "time_scale_reason": self._choice.reason,
            "network": self._network.get((trial.network or "", self._choice.time_scale))
            or network_record(network_profile(trial.network or ""), []),
            "fault_events": self._events.get(trial.hash, []),
        }

    def _choose(self, trial: Trial) -> Choice:
        if trial.time_scale is not None:
            return Choice(time_scale=trial.time_scale, reason="given")
        if not is_replay(trial.model):
            return Choice(time_scale=1.0, reason="the model computes for real")
        if self._calibration is None:
            self._calibration = calibrate(self._cluster.hosts)
        profile = profile_of(trial.model, trial.batch_size, trial.sentence_len)
        load = Load(
            world_size=trial.world_size,
            hosts=trial.hosts or 1,
            parameter_bytes=profile.parameter_bytes,
            step_s=profile.step_s,
        )
        network = network_profile(trial.network or "")
        return choose_time_scale(load, network, self._calibration, len(os.sched_getaffinity(0)))
