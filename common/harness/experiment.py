"""From a YAML file and `--set` overrides to a list of trials."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from common.harness.trial import BASELINE, MeasureConfig, OptimizerConfig, Trial
from common.models.registry import model_entry, sentence_len
from dear.algorithm import algorithm_options
from dear.errors import UserError, unknown
from dear.options import at_least, build_options, positive

DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class AlgorithmChoice:
    """An algorithm with options that differ from its defaults."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model and how it is fed; None takes the registry's default."""

    name: str
    batch_size: int | None = None
    """Samples per worker."""
    sentence_len: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            at_least("batch_size", self.batch_size, 1)
        if self.sentence_len is not None:
            at_least("sentence_len", self.sentence_len, 1)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The keys of an experiment file."""

    name: str
    """Names the folders of logs and plots."""
    description: str = ""
    algorithms: tuple[AlgorithmChoice | str, ...]
    models: tuple[ModelChoice | str, ...]
    world_sizes: tuple[int, ...] = (2,)
    baseline: bool = True
    """Also run one worker with the plain optimizer; scaling efficiency is relative to it."""
    compare_to: str | None = None
    """The algorithm (or its label) that speed-ups are relative to; None takes the first."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    launcher: Literal["local", "mpirun"] = "local"
    hostfile: str | None = None
    """For mpirun: lines `HOST slots=N`; relative to the current folder."""
    backend: Literal["comm_core", "gloo", "mpi", "nccl"] | None = None
    """What moves the bytes; None takes comm_core for cpu and nccl for cuda."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    seed: int = 1
    threads_per_rank: int | None = None
    """None shares the cores of this machine among the ranks of the largest world."""
    timeout_s: float = 600.0
    """Longest duration of one repeat of one trial, in seconds; then it is killed."""

    def __post_init__(self) -> None:
        if not self.name or any(c in self.name for c in "/\\ ") or self.name.startswith("."):
            raise UserError(f"name: must be usable as a folder's name, got {self.name!r}")
        for key in ("algorithms", "models", "world_sizes"):
            if not getattr(self, key):
                raise UserError(f"{key}: must not be empty")
        for size in self.world_sizes:
            at_least("world_sizes", size, 1)
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.threads_per_rank is not None:
            at_least("threads_per_rank", self.threads_per_rank, 1)
        positive("timeout_s", self.timeout_s)
        at_least("seed", self.seed, 0)
        if self.backend == "nccl" and self.device == "cpu":
            raise UserError("backend: nccl moves CUDA tensors only; use device: cuda or comm_core")
        if self.backend == "mpi" and self.launcher != "mpirun":
            raise UserError("backend: mpi needs ranks that mpirun started; use launcher=mpirun")
        if self.hostfile is not None and self.launcher != "mpirun":
            raise UserError(f"hostfile: launcher {self.launcher} reads none; use launcher=mpirun")
        for choice in self.algorithm_choices():
            algorithm_options(choice.name, choice.options)
        known = {n for a in self.algorithm_choices() for n in (a.name, a.label) if n is not None}
        if self.compare_to is not None and self.compare_to not in known:
            raise unknown("compare_to", self.compare_to, known)
        for choice in self.model_choices():
            sentence_len(choice.name, choice.sentence_len)

    def algorithm_choices(self) -> list[AlgorithmChoice]:
        return [AlgorithmChoice(name=a) if isinstance(a, str) else a for a in self.algorithms]

    def model_choices(self) -> list[ModelChoice]:
        return [ModelChoice(name=m) if isinstance(m, str) else m for m in self.models]

    @property
    def base(self) -> str:
        """What speed-ups are relative to."""
        first = self.algorithm_choices()[0]
        return self.compare_to or first.label or first.name

    def trials(self) -> list[Trial]:
        """Every combination, by model; within a model the baseline first."""
        trials = []
        for model in self.model_choices():
            if self.baseline:
                trials.append(self._trial(AlgorithmChoice(name=BASELINE), model, 1))
            for world_size in self.world_sizes:
                for algorithm in self.algorithm_choices():
                    trials.append(self._trial(algorithm, model, world_size))
        seen: dict[str, Trial] = {}
        for trial in trials:
            if trial.hash in seen:
                raise UserError(f"{trial.title} stands twice in the experiment")
            seen[trial.hash] = trial
        return trials

    def _trial(self, algorithm: AlgorithmChoice, model: ModelChoice, world_size: int) -> Trial:
        entry = model_entry(model.name)
        cores = len(os.sched_getaffinity(0))
        threads = self.threads_per_rank or max(1, cores // max(self.world_sizes))
        options = {}
        if algorithm.name != BASELINE:
            options = dataclasses.asdict(algorithm_options(algorithm.name, algorithm.options))
        shown = ",".join(f"{key}={value}" for key, value in algorithm.options.items())
        label = algorithm.label or algorithm.name + (f"({shown})" if shown else "")
        return Trial(
            algorithm=algorithm.name,
            options=options,
            model=model.name,
            batch_size=model.batch_size or entry.batch_size,
            sentence_len=sentence_len(model.name, model.sentence_len),
            world_size=world_size,
            launcher=self.launcher,
            backend=self.backend or {"cpu": "comm_core", "cuda": "nccl"}[self.device],
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
            threads_per_rank=threads,
            optimizer=self.optimizer,
            measure=self.measure,
            label="single worker" if algorithm.name == BASELINE else label,
        )


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key that stands twice; plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment file; `overrides` are `key=value` with dots and list indices in keys.

    Raises:
        UserError: no such file, no YAML, an unknown key, or a value that is not allowed.
    """
    try:
        values = yaml.load(path.read_text(), _StrictLoader)
    except OSError as error:
        raise UserError(f"experiment {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or a date that does not exist
        raise UserError(f"experiment {path}: not valid YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not readable"
        raise UserError(f"experiment {path}{where}: not valid YAML: {problem}") from None
    if not isinstance(values, dict):
        raise UserError(f"experiment {path}: must be a mapping of keys to values")
    for override in overrides:
        _override(values, override)
    values.setdefault("name", path.stem)
    return build_options(Experiment, values, "experiment key")


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, value_text = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text!r}: must be key=value, e.g. --set measure.repeats=5")
    try:
        value = yaml.safe_load(value_text)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"--set {text!r}: the value is not valid YAML") from None
    *path, last = key.split(".")
    here: Any = values
    for part in path:
        here = _descend(here, part, text)
    here[_index(here, last, text) if isinstance(here, list) else last] = value


def _descend(here: Any, part: str, text: str) -> Any:
    inner = here[_index(here, part, text)] if isinstance(here, list) else here.setdefault(part, {})
    if not isinstance(inner, (dict, list)):
        raise UserError(f"--set {text!r}: {part!r} is a value, not a mapping or a list")
    return inner


def _index(here: list[Any], part: str, text: str) -> int:
    if not part.isdigit() or int(part) >= len(here):
        raise UserError(f"--set {text!r}: {part!r} is no index of a list of {len(here)}")
    return int(part)
