"""Trial: all settings that can change a result; and briefing: facts that a launch needs besides."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.emulation.config import Fault
from common.harness.settings import LearnConfig, MeasureConfig, OptimizerConfig
from common.models import registry
from common.models.registry import Brought
from common.models.replay.pace import Pace
from common.results.records import typed
from dear.cost.fit import CollectiveCost
from dear.errors import UserError
from dear.options import settings
from dear.training.algorithm import (
    Options,
    Plugin,
    algorithm_class,
    algorithm_names,
    algorithm_options,
    load_plugin,
)
from dear.training.files import digest_of

BASELINE = "none"
"""Name of the single worker's algorithm: the plain optimizer, without communication."""
SEED_PER_REPEAT = 100

_TRIAL = "trial.json"
_BRIEFING = "briefing.json"


def options_of(algorithm: str, given: Mapping[str, object]) -> Options:
    """Returns the typed `algorithm_options`; the single worker has none."""
    return Options() if algorithm == BASELINE else algorithm_options(algorithm, given)


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """Settings of torch for GPUs."""

    tf32: bool = False
    cudnn_benchmark: bool = False


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Files on which a trial depends, most of them as a digest of their content."""

    data_digest: str | None = None
    """Digest of the data set; None for synthetic data."""
    profile_digest: str | None = None
    """Digest of the layer profile that is replayed; None if the model computes."""
    network_digest: str | None = None
    """Digest of the network profile; None if nothing is emulated."""
    plugin: Plugin | None = None
    """File of an algorithm that does not come with the project."""
    brought: Brought | None = None
    """Source of a model that does not come with the project, or its profile."""
    hosts_digest: str | None = None
    """Digest of the hosts of a hostfile; None without one, and then not in the JSON."""
    envs: dict[str, str] | None = None
    """Values of configs/envs.conf that the trial uses; None if there are none, and then not in the
    JSON."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Point of an experiment, with all settings resolved.

    In JSON, the fields of `cuda` and `sources` are at the top level.
    """

    algorithm: str
    options: Options = field(default_factory=Options)
    """Typed options of the algorithm."""
    model: str
    batch_size: int
    """Samples per worker."""
    sentence_len: int | None
    world_size: int
    launcher: str
    launcher_options: dict[str, object] = field(default_factory=dict)
    """Options of the launcher beyond its defaults that may change a measurement (`rdma`)."""
    backend: str
    """Backend of torch.distributed."""
    device: Literal["cpu", "cuda"]
    dtype: str
    cuda: Cuda = field(default_factory=Cuda)
    seed: int
    threads_per_rank: int
    optimizer: OptimizerConfig
    measure: MeasureConfig
    label: str
    """Name of the algorithm in tables; it distinguishes variants with different options."""
    network: str | None = None
    """Network of the virtual hosts; None if nothing is emulated."""
    ranks_per_host: int | None = None
    """Ranks of each virtual host; None if nothing is emulated."""
    time_scale: float | None = None
    """Time scale of the emulated cluster that the user gave. None: the harness chooses one for all
    trials of a cell (those that are compared) and writes it into their records."""
    collective_timeout_s: float = 300.0
    """Time limit of one collective, in seconds of this machine; then it fails."""
    fault: Fault | None = None
    """Fault of the cluster during each repeat."""
    learn: LearnConfig | None = None
    """Settings of a training trial; None: steps are timed. A training trial uses only the repeats
    of `measure`, and its warm-up steps if there are no data."""
    twin: int = 0
    """Number of earlier trials of the experiment that differ only in their label."""
    sources: Sources = field(default_factory=Sources)

    @functools.cached_property
    def hash(self) -> str:
        """Identity of the trial, as `identity` defines it."""
        return identity(self.to_json())

    @property
    def id(self) -> str:
        """Readable and unique name of the trial, and of its folder."""
        name = f"{self.model}-bs{self.batch_size}-n{self.world_size}-{self.algorithm}"
        return re.sub(r"[^\w.+@-]", "-", f"{name}-{self.hash[:8]}")

    @property
    def title(self) -> str:
        """Description of the trial for readers."""
        text = f"{self.model} bs={self.batch} n={self.world_size} {self.label}"
        if self.network is not None:
            text += f" {self.network}"
        return text if self.fault is None else f"{text}, {self.fault.title}"

    def of_repeat(self, repeat: int) -> Trial:
        """Returns the trial with a repeat's seed; only training trials change the seed.

        Each epoch uses the next seed, so the seeds of repeats are far apart.
        """
        if self.learn is None:
            return self
        return dataclasses.replace(self, seed=self.seed + SEED_PER_REPEAT * repeat)

    @property
    def rank_batches(self) -> tuple[int, ...]:
        """Samples per step of each rank."""
        given = self.learn.batch_sizes if self.learn is not None else None
        return given or (self.batch_size,) * self.world_size

    @property
    def batch(self) -> str:
        """Text with the samples per step and rank, or of each rank with `learn.batch_sizes`."""
        given = self.learn is not None and self.learn.batch_sizes
        return ",".join(map(str, given or (self.batch_size,)))

    @property
    def hosts(self) -> int | None:
        """Number of virtual hosts that the ranks need; None if nothing is emulated."""
        if self.ranks_per_host is None:
            return None
        return -(-self.world_size // self.ranks_per_host)

    @property
    def own_pace(self) -> bool:
        """True if no rank waits for another, so that ranks may make different numbers of steps."""
        if self.learn is None or self.algorithm == BASELINE:
            return False
        consistency = algorithm_class(self.algorithm).capabilities.consistency
        return consistency == "asynchronous" and not self.options.in_step()

    @property
    def cell(self) -> Hashable:
        """Key of the cell: all settings that compared trials share (not algorithm and size)."""
        same = dataclasses.replace(
            self,
            algorithm="",
            options=Options(),
            label="",
            world_size=0,
            learn=self.learn and dataclasses.replace(self.learn, batch_sizes=None),
            twin=0,
            sources=dataclasses.replace(self.sources, plugin=None),
        )
        return (self.model, self.batch_size, same.hash)

    def to_json(self) -> dict[str, object]:
        """Returns all fields as JSON values, which have no tuples."""
        values = dataclasses.asdict(self)
        values["options"] = settings(self.options)
        for group in ("cuda", "sources"):
            values |= values.pop(group)
        for key in ("hosts_digest", "envs"):  # earlier records lack them: keeps their hashes
            if values[key] is None:
                del values[key]
        return json.loads(json.dumps(values))

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Trial:
        """Returns the trial from the result of `to_json`.

        Loads the plugin and the custom model, if this process has not loaded them.

        Raises:
            UserError: one of their files is missing or has changed.
        """
        sources = typed(Sources, values)
        if sources.plugin is not None and values["algorithm"] not in algorithm_names():
            load_plugin(Path(sources.plugin.path), sources.plugin.digest)
        options = options_of(values["algorithm"], values["options"])
        groups = {"options": options, "cuda": values, "sources": sources}
        trial = typed(cls, {**values, **groups})
        trial._bring_model()
        return trial

    def _bring_model(self) -> None:
        model = self.sources.brought
        if model is None or registry.brought_of(self.model, self.batch_size) is not None:
            return
        if model.profile is None and model.source.startswith(registry.FILE):
            path = Path(model.source.removeprefix(registry.FILE))
            if digest_of(path) != model.digest:
                raise UserError(f"{path}: has changed since the sweep began; start the sweep again")
        registry.bring(self.model, model)

    def save(self, folder: Path) -> None:
        """Writes the trial into the folder that its workers read."""
        (folder / _TRIAL).write_text(json.dumps(self.to_json(), indent=2), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Trial:
        """Reads the trial that `save` wrote, for a rank.

        Raises:
            UserError: as `from_json`, or the profile of a replayed model has changed.
        """
        trial = cls.from_json(json.loads((folder / _TRIAL).read_bytes()))
        if trial.sources.profile_digest is not None:
            profile = registry.profile_of(trial.model, trial.batch_size)
            if profile.digest != trial.sources.profile_digest:
                raise UserError(
                    f"the profile of {trial.model} has changed since the sweep began, or is "
                    "another one on this host; start the sweep again"
                )
        return trial


def identity(values: Mapping[str, Any]) -> str:
    """Returns the identity of a trial from its JSON values: a digest of all but the label.

    For files, their digest is used, not their path, which differs between machines.
    """
    kept = {key: value for key, value in values.items() if key != "label"}
    for key in ("plugin", "brought"):
        source = kept.get(key)
        if source is not None and source["digest"] is not None:
            kept[key] = source["digest"]
        elif source is not None and "profile" in source:  # `profile_digest` stands for it
            kept[key] = {name: value for name, value in source.items() if name != "profile"}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Briefing:
    """Facts about a launch that the workers need in addition to the trial.

    The defaults describe one unnamed host at full speed.
    """

    folder: Path
    """Folder of the trial."""
    time_scale: float = 1.0
    """Factor by which the emulated cluster is slower than the modelled cluster."""
    hosts: Sequence[str] = ()
    ranks_per_host: int = 1
    burst_bytes: int = 0
    """Bytes that the link of each host passes without delay after an idle period."""
    wire_bytes_per_s: float | None = None
    """Payload bytes per real second that the link of each rank carries in each direction; None if
    unknown, or if ranks share a link."""
    links_pid: int | None = None
    """PID of the program that emulates the links, as the virtual hosts' /proc shows it."""
    costs: dict[str, CollectiveCost] | None = None
    """Costs of collectives that another trial measured, in seconds of the modelled cluster."""

    @classmethod
    def load(cls, folder: Path) -> Briefing:
        """Reads the facts from the trial's folder."""
        return typed(cls, {**json.loads((folder / _BRIEFING).read_bytes()), "folder": folder})

    def save(self) -> None:
        """Writes the facts into the trial's folder."""
        values = dataclasses.asdict(self)
        del values["folder"]
        (self.folder / _BRIEFING).write_text(json.dumps(values, indent=2), encoding="utf-8")

    def pace(self, rank: int) -> Pace:
        """Returns the pace of replayed compute on the host of a rank."""
        if not self.hosts:
            return Pace(self.time_scale, None)
        host = self.hosts[rank // self.ranks_per_host]
        return Pace(self.time_scale, self.folder / f"pace-{host}")
