"""A trial: everything that can change a number, and nothing else; and what its workers are told."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.emulation.config import Fault
from common.harness.learn import LearnConfig
from common.models import registry
from common.models.registry import Brought
from common.models.replay.pace import Pace
from common.results.records import typed
from dear.cost.fit import CollectiveCost
from dear.errors import UserError
from dear.options import at_least, positive
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
"""The algorithm of the single-worker baseline: the plain optimizer, no communication."""
SEED_PER_REPEAT = 100

_TRIAL = "trial.json"
_BRIEFING = "briefing.json"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The same optimizer and settings for every algorithm of an experiment."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimizer of torch."""
    lr: float = 0.01
    """Learning rate."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay."""

    def __post_init__(self) -> None:
        positive("optimizer.lr", self.lr)
        at_least("optimizer.momentum", self.momentum, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        if self.name != "sgd" and self.momentum:
            raise UserError(f"optimizer.momentum: {self.name} has none; it is an option of sgd")

    @property
    def state_copies(self) -> int:
        """Tensors of optimizer state per parameter."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)

    @property
    def update_passes(self) -> int:
        """Passes of an update over as much memory as the parameters take: it reads gradients, and
        reads and writes parameters and state."""
        return 3 + 2 * self.state_copies


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Number and length of the measurements. Each step is timed; warm-up steps are left out."""

    repeats: int | tuple[int, int] = 3
    """Separate starts of the workers, interleaved with those of the compared algorithms. With
    `precision`: the smallest and the largest number, as [5, 12]."""
    precision: float | None = None
    """Half width of the 95 % intervals, relative to the value, at which all trials of a cell stop
    together. Differences between them do not matter."""
    repeats_at_2k: int = 0
    """Extra repeats of an emulated cell at twice its time scale k. They estimate the systematic
    error, and are not part of the result."""
    warmup_steps: int = 3
    """Least untimed steps. Steps in which the algorithm tunes itself are untimed, too."""
    num_iters: int = 1
    """Blocks of steps per repeat, with a barrier before each block."""
    steps_per_iter: int | None = None
    """Steps per block; null: rank 0 chooses, so that a block takes `min_iter_s`."""
    min_iter_s: float = 1.0
    """Duration of a block in seconds, if rank 0 chooses the number of steps."""
    min_steps: int = 3
    """Smallest number of steps per block, if rank 0 chooses it."""
    check_steps: int = 2
    """Steps that are trained both with and without the algorithm, and compared."""

    def __post_init__(self) -> None:
        if not isinstance(self.repeats, int):
            object.__setattr__(self, "repeats", tuple(self.repeats))
            if len(self.repeats) != 2 or self.repeats[0] > self.repeats[1]:
                raise UserError(
                    f"measure.repeats: must be a number or [least, most], got {list(self.repeats)}"
                )
        positive("measure.precision", self.precision)
        if isinstance(self.repeats, int) != (self.precision is None):
            raise UserError(
                "measure: `precision` and a range of `repeats` go together, e.g. "
                "{repeats: [5, 12], precision: 0.02}"
            )
        at_least("measure.repeats", self.least_repeats, 1)
        for name in ("num_iters", "min_steps", "check_steps"):
            at_least(f"measure.{name}", getattr(self, name), 1)
        at_least("measure.repeats_at_2k", self.repeats_at_2k, 0)
        at_least("measure.warmup_steps", self.warmup_steps, 0)
        positive("measure.min_iter_s", self.min_iter_s)
        if self.steps_per_iter is not None:
            at_least("measure.steps_per_iter", self.steps_per_iter, 1)

    @property
    def least_repeats(self) -> int:
        """How many there are in any case."""
        return self.repeats if isinstance(self.repeats, int) else self.repeats[0]

    @property
    def most_repeats(self) -> int:
        """How many there are if the intervals stay too wide."""
        return self.repeats if isinstance(self.repeats, int) else self.repeats[1]

    @property
    def plan(self) -> str:
        """For people: how many repeats there will be, and until when."""
        text = f"{self.least_repeats} repeats"
        if self.precision is not None:
            text = (
                f"{self.least_repeats} to {self.most_repeats} repeats, until the interval is "
                f"+-{100 * self.precision:g} % of its value"
            )
        more = self.repeats_at_2k
        return text + (f", and {more} at twice the time scale" if more else "")


def options_of(algorithm: str, given: Mapping[str, Any]) -> Options:
    """The typed `algorithm_options`; the baseline has none."""
    return Options() if algorithm == BASELINE else algorithm_options(algorithm, given)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of an experiment, resolved: no defaults are left to fill in."""

    algorithm: str
    options: Options = field(default_factory=Options)
    """The algorithm's own, typed."""
    model: str
    batch_size: int
    """Samples per worker."""
    sentence_len: int | None
    world_size: int
    launcher: str
    backend: str
    """torch.distributed backend."""
    device: Literal["cpu", "cuda"]
    dtype: str
    tf32: bool = False
    cudnn_benchmark: bool = False
    seed: int
    threads_per_rank: int
    optimizer: OptimizerConfig
    measure: MeasureConfig
    label: str
    """How tables name the algorithm; tells option variants apart."""
    launcher_options: dict[str, Any] = field(default_factory=dict)
    """What the launcher was asked for beyond its defaults (interfaces, `rdma`)."""
    network: str | None = None
    """Of the virtual hosts' links; None where nothing is emulated."""
    ranks_per_host: int | None = None
    """On virtual hosts; None where nothing is emulated."""
    time_scale: float | None = None
    """Emulated clusters: how many times slower than asked for they run; None: chosen by the
    harness, the same for all trials of a cell, and written into the record."""
    collective_timeout_s: float = 300.0
    """The longest that one collective may take, in seconds of this machine; then it fails."""
    fault: Fault | None = None
    """What is done to the cluster meanwhile."""
    learn: LearnConfig | None = None
    """Training for a time instead of timed steps; of `measure` the repeats count then, and without
    data the steps of warm-up."""
    data_digest: str | None = None
    """Of what it learns from; None where that is made up."""
    twin: int = 0
    """Counts trials of an experiment that differ in nothing but their label."""
    profile_digest: str | None = None
    """Of the layer profile that is replayed; None where the model computes for real."""
    network_digest: str | None = None
    """Of what `network` stood for; None where nothing is emulated."""
    plugin: Plugin | None = None
    """The file of an algorithm that does not come with the project."""
    brought: Brought | None = None
    """Where a model is from that does not, or its profile."""

    @property
    def hash(self) -> str:
        """Identity of the trial: a digest of all fields but the label.

        A file counts by its digest, wherever it lies.
        """
        values = self.to_json()
        del values["label"]
        for key in ("plugin", "brought"):
            if values[key] is not None and values[key]["digest"] is not None:
                values[key] = values[key]["digest"]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def id(self) -> str:
        """Readable and unique; the name of the trial's folder."""
        model = self.model.replace(":", "-")
        return f"{model}-bs{self.batch_size}-n{self.world_size}-{self.algorithm}-{self.hash[:8]}"

    @property
    def title(self) -> str:
        """For people: what is run."""
        text = f"{self.model} bs={self.batch} n={self.world_size} {self.label}"
        if self.network is not None:
            text += f" {self.network}"
        return text if self.fault is None else f"{text}, {self.fault.title}"

    def of_repeat(self, repeat: int) -> Trial:
        """As that repeat trains it: where something is learned each has a seed of its own.

        Every round of the data takes the next seed, so those of repeats are further apart.
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
        """For people: samples per step and rank; of each rank if `learn.batch_sizes` says so."""
        given = self.learn is not None and self.learn.batch_sizes
        return ",".join(map(str, given or (self.batch_size,)))

    @property
    def hosts(self) -> int | None:
        """Number of virtual hosts that the ranks need; None where nothing is emulated."""
        if self.ranks_per_host is None:
            return None
        return -(-self.world_size // self.ranks_per_host)

    @property
    def own_pace(self) -> bool:
        """Whether ranks wait for nobody, and may make different numbers of steps."""
        if self.learn is None or self.algorithm == BASELINE:
            return False
        consistency = algorithm_class(self.algorithm).capabilities.consistency
        return consistency == "asynchronous" and not self.options.in_step()

    @property
    def cell(self) -> tuple[Any, ...]:
        """What compared trials have in common: all but algorithm and world size."""
        learn = self.learn and dataclasses.replace(self.learn, batch_sizes=None)
        same = dataclasses.replace(
            self,
            algorithm="",
            options=Options(),
            plugin=None,
            label="",
            world_size=0,
            learn=learn,
            twin=0,
        )
        return (self.model, self.batch_size, same.hash)

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as JSON values, which have no tuples."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Trial:
        """What `to_json` gave. Files that it needs are loaded, where this process has not.

        Raises:
            UserError: one of them is gone, or not what it was.
        """
        _load(values)
        options = options_of(values["algorithm"], values["options"])
        return typed(cls, {**values, "options": options})

    def save(self, folder: Path) -> None:
        """Into the folder that its workers read."""
        (folder / _TRIAL).write_text(json.dumps(self.to_json(), indent=2))

    @classmethod
    def load(cls, folder: Path) -> Trial:
        """What `save` wrote."""
        return cls.from_json(json.loads((folder / _TRIAL).read_text()))


def _load(values: Mapping[str, Any]) -> None:
    """What a trial needs besides what comes with the project."""
    plugin, brought = values.get("plugin"), values.get("brought")
    if plugin is not None and values["algorithm"] not in algorithm_names():
        load_plugin(Path(plugin["path"]), plugin["digest"])
    if brought is None:
        return
    model = Brought(**brought)
    if registry.brought_of(values["model"], values["batch_size"]) is not None:
        return
    if model.profile is None and model.source.startswith(registry.FILE):
        path = Path(model.source.removeprefix(registry.FILE))
        if digest_of(path) != model.digest:
            raise UserError(f"{path}: not what it was when the sweep began; start it again")
    registry.bring(values["model"], model)


@dataclass(frozen=True, kw_only=True)
class Briefing:
    """What the workers of a trial are told besides it, anew for each repeat.

    As it is: on one host without a name, at full speed.
    """

    folder: Path
    """The trial's."""
    time_scale: float = 1.0
    """How many times slower than what it stands for the emulated cluster runs."""
    hosts: Sequence[str] = ()
    ranks_per_host: int = 1
    burst_bytes: int = 0
    """What the link of each host passes at once after a rest."""
    wire_bytes_per_s: float | None = None
    """Payload that the link of each rank carries each way, in seconds of this machine; None where
    it is not known, or ranks share one."""
    links_pid: int | None = None
    """Of the program that is the links between virtual hosts, as their /proc shows it."""
    costs: dict[str, CollectiveCost] | None = None
    """What another trial has found out of collectives, in seconds of what the fabric stands for."""

    @classmethod
    def load(cls, folder: Path) -> Briefing:
        """From the trial's folder."""
        return typed(cls, {**json.loads((folder / _BRIEFING).read_text()), "folder": folder})

    def save(self) -> None:
        """Into the trial's folder."""
        values = dataclasses.asdict(self)
        del values["folder"]
        (self.folder / _BRIEFING).write_text(json.dumps(values, indent=2))

    def pace(self, rank: int) -> Pace:
        """How fast replayed compute runs on the host of `rank`."""
        if not self.hosts:
            return Pace(self.time_scale, None)
        host = self.hosts[rank // self.ranks_per_host]
        return Pace(self.time_scale, self.folder / f"pace-{host}")
