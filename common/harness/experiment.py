"""Keys of an experiment file, checks of their combinations, and the trials of the experiment.

A trial is one combination, for example of algorithm, model, network and number of workers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.emulation.config import ClusterConfig, Fault
from common.emulation.dilation import check_scale
from common.emulation.faults import check_fault
from common.emulation.links import check as check_links
from common.emulation.links.profile import network_profile
from common.harness.custom import bring_model
from common.harness.settings import LearnConfig, MeasureConfig, OptimizerConfig
from common.harness.trial import BASELINE, Cuda, Sources, Trial
from common.launch.hosts import digest_of_hosts, read_envs, read_hostfile
from common.launch.job import administrative, launcher_options
from common.machine.cgroups import usable_cores
from common.models import datasets
from common.models.registry import (
    DTYPES,
    MODELS,
    brought_of,
    is_replay,
    model_entry,
    profile_of,
    sentence_len,
)
from common.paths import BUILD
from common.results.records import base_among
from common.virtual.over import MOST_WORKERS
from dear.algorithms import aliases
from dear.comm.backends import missing_comm_core
from dear.errors import UserError, unknown
from dear.options import at_least, positive
from dear.training.algorithm import Options, algorithm_options, plugin_of

_CONTROLS = {*map(chr, range(32)), "\x7f"}


@dataclass(frozen=True, kw_only=True)
class AlgorithmChoice:
    """An algorithm with options that differ from its defaults."""

    name: str
    """Name of an algorithm, as in `list`, or an alias."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the algorithm that differ from its defaults."""
    label: str | None = None
    """Name in tables; null: the algorithm's name and its options."""

    def __post_init__(self) -> None:
        label = "x" if self.label is None else self.label
        if not label.strip() or any(c in _CONTROLS for c in label):
            raise UserError(f"label: must be a name on one line, got {self.label!r}")
        name, options = aliases.resolved(self.name, self.options)
        if name != self.name and self.label is None:
            object.__setattr__(self, "label", self.title)  # as the user named it
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", options)

    @property
    def title(self) -> str:
        """Name in tables."""
        shown = ",".join(f"{key}={value}" for key, value in self.options.items())
        return self.label or self.name + (f"({shown})" if shown else "")


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model and the size of its batches."""

    name: str
    """Model as in `list`, or `file:PATH`, `hf:TYPE`, `timm:NAME` (docs/bring_your_own.md)."""
    batch_size: int | None = None
    """Samples per worker and step; null: the model's default."""
    sentence_len: int | None = None
    """Tokens per sentence; null: the model's default."""
    gpu: str | None = None
    """GPU whose compute times are replayed: one of configs/gpus.yaml (modelled), or `here`
    (measured on this machine's GPU, unless the project has a profile of this GPU). For a measured
    profile of another GPU, use `MODEL@DEVICE`, such as `resnet50@h200`. null: the model computes,
    unless its name is `MODEL@DEVICE`. Without this key, models of a predicted cluster, and those of
    `--model` on virtual hosts, replay this machine's GPU, or an RTX 2080 Ti if there is none."""

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            at_least("batch_size", self.batch_size, 1)
        if self.sentence_len is not None:
            at_least("sentence_len", self.sentence_len, 1)

    def brought(self) -> ModelChoice:
        """Registers a custom model; returns the choice with the model's name in trials."""
        name, batch_size, sentence_len = bring_model(
            self.name, self.batch_size, self.sentence_len, self.gpu
        )
        return ModelChoice(name=name, batch_size=batch_size, sentence_len=sentence_len)


MEASURED_ONLY = ("launcher", "threads_per_rank", "report_lines", "data_dir", "timeout_s")
MEASURED_ONLY += ("collective_timeout_s", "seed")
"""Keys of `Experiment` that have no meaning for a predicted cluster."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The keys of an experiment file."""

    name: str
    """Name of the sweep and of its folder."""
    description: str = ""
    """Text that `list` shows."""
    plugins: tuple[str, ...] = ()
    """Python files with algorithms that do not come with the project."""
    algorithms: tuple[AlgorithmChoice | str, ...]
    """Algorithms to compare, each a name or a mapping."""
    models: tuple[ModelChoice | str, ...]
    """Models to train, each a name or a mapping."""
    world_sizes: tuple[int, ...] | None = None
    """Numbers of workers; null: all ranks of the emulated cluster, or 2 workers."""
    baseline: bool = True
    """Also run one worker with the plain optimizer. Scaling efficiency is relative to it."""
    compare_to: str | None = None
    """Baseline of the speed-ups: a label, or an algorithm with a single variant. null: the first
    algorithm."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of all trials."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    """Number and length of the measurements."""
    learn: LearnConfig | None = None
    """Train for a number of seconds or epochs and record accuracy and loss. Steps are not timed."""
    data_dir: str | None = None
    """Folder of the files of `learn.data` (`text`: a file); null: the value of `MNIST_DIR`,
    `CIFAR_DIR`, `IMAGE_DIR` or `TEXT_FILE`."""
    cluster: ClusterConfig | None = None
    """Virtual hosts to run on; null: the real machine, or the hosts of the launcher."""
    networks: tuple[str, ...] = ()
    """Networks on which every trial runs, in place of `cluster.network`."""
    faults: tuple[Fault, ...] = ()
    """Faults with which every trial but the single worker runs, in addition to a run without a
    fault."""
    collective_timeout_s: float = 300.0
    """Time limit of one collective, in real seconds; a longer collective fails. It does not
    hold for a library that sends messages itself, such as Horovod."""
    launcher: str = "local"
    """Program that starts the ranks: local, torchrun, mpirun, ssh, slurm or nodes."""
    launcher_options: dict[str, Any] = field(default_factory=dict)
    """Options of the launcher (docs/clusters.md)."""
    hostfile: str | None = None
    """File with lines `HOST slots=N` for launchers that reach other hosts; relative to the current
    folder."""
    backend: Literal["comm_core", "gloo", "mpi", "nccl"] | None = None
    """Backend of torch.distributed; null: comm_core for cpu (gloo if it is not built), nccl for
    cuda."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the model."""
    dtype: str = "float32"
    """Type of parameters and inputs. `amp-bf16` and `amp-fp16`: float32 with autocast in 16 bits
    (fp16 with a GradScaler)."""
    tf32: bool = False
    """GPUs: compute matrix products and convolutions of float32 in TensorFloat-32."""
    cudnn_benchmark: bool = False
    """GPUs: let cuDNN search for the fastest convolutions in the first steps."""
    seed: int = 1
    """Seed of parameters and data."""
    threads_per_rank: int | None = None
    """Compute threads of each rank; null: the cores divided by the most ranks on one machine."""
    report_lines: bool = False
    """Also print, at the end, the result lines that the reference suites print
    (docs/references.md), for programs that read them."""
    timeout_s: float = 600.0
    """Time limit of one repeat of one trial, in real seconds (at 2k, twice as long); a longer
    repeat is stopped."""

    def __post_init__(self) -> None:
        for key, kind in (("algorithms", AlgorithmChoice), ("models", ModelChoice)):
            given = getattr(self, key)
            chosen = tuple(kind(name=item) if isinstance(item, str) else item for item in given)
            object.__setattr__(self, key, chosen)
        wrong = any(c in "/\\ " or c in _CONTROLS for c in self.name)
        if not self.name or wrong or self.name.startswith("."):
            raise UserError(
                f"name: must be usable as a folder's name, got {self.name!r} (without the key "
                "`name`, it is the file's name)"
            )
        for key in ("algorithms", "models"):
            if not getattr(self, key):
                raise UserError(f"{key}: must not be empty")
        if self.world_sizes is not None and not self.world_sizes:
            raise UserError("world_sizes: must not be empty")
        for size in self.worlds:
            at_least("world_sizes", size, 1, MOST_WORKERS)
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.threads_per_rank is not None:
            at_least("threads_per_rank", self.threads_per_rank, 1, _MOST_THREADS)
        positive("timeout_s", self.timeout_s)
        positive("collective_timeout_s", self.collective_timeout_s)
        at_least("seed", self.seed, 0, _LARGEST_SEED)
        self._check_launch()
        object.__setattr__(self, "models", tuple(choice.brought() for choice in self.models))
        self._check_cluster()
        self._check_learning()
        for choice, others in itertools.groupby(sorted(a.title for a, _ in self._chosen)):
            if len(list(others)) > 1:
                raise UserError(f"algorithms: {choice} is listed twice; give one of them a label")
        _ = self.base
        for choice in self.models:
            sentence_len(choice.name, choice.sentence_len)
            if is_replay(choice.name):
                if self.dtype.startswith("amp-"):
                    raise UserError(f"dtype: {choice.name} is replayed; use dtype: float32")
                if self.device != "cpu":
                    raise UserError(f"device: {choice.name} is replayed on CPUs; use device: cpu")
                batch_size = choice.batch_size or model_entry(choice.name).batch_size
                others = self.learn.batch_sizes if self.learn is not None else None
                for size in (batch_size, *(others or ())):
                    dtype = profile_of(choice.name, size, choice.sentence_len).dtype
                    # Mixed precision computes in 16 bits, and sends gradients in 32.
                    if self.dtype != "float32" and not dtype.startswith(self.dtype):
                        raise UserError(
                            f"dtype: {choice.name} replays times that were measured in {dtype}; "
                            "use dtype: float32"
                        )

    def _check_launch(self) -> None:
        launcher_options(self.launcher, self.launcher_options)
        if self.backend == "nccl" and self.device == "cpu":
            raise UserError("backend: nccl moves CUDA tensors only; use device: cuda or comm_core")
        for key in ("tf32", "cudnn_benchmark"):
            if getattr(self, key) and self.device != "cuda":
                raise UserError(f"{key}: needs device: cuda")
        if self.backend == "mpi" and self.launcher != "mpirun":
            raise UserError("backend: mpi needs ranks that mpirun started; use launcher=mpirun")
        if self.hostfile is not None and self.launcher == "local":
            raise UserError("hostfile: launcher local uses no hostfile; use mpirun or ssh")

    def _check_learning(self) -> None:
        learn = self.learn
        if self.data_dir is not None and (learn is None or learn.data is None):
            raise UserError("data_dir: used only with `learn`; add `learn: {data: mnist}`")
        if learn is None:
            return
        if self.report_lines:
            raise UserError(
                "report_lines: has no effect with learn; the lines have rates of timed steps"
            )
        used = {"repeats"} | ({"warmup_steps"} if learn.data is None else set())
        for key in dataclasses.fields(self.measure):
            if key.name not in used and getattr(self.measure, key.name) != key.default:
                raise UserError(
                    f"measure.{key.name}: has no effect with learn; allowed: "
                    f"{', '.join(sorted(used))}"
                )
        for name in (choice.name for choice in self.models) if learn.data else ():
            kinds = datasets.SOURCES[learn.data].kinds
            if is_replay(name) or model_entry(name).learns not in kinds:
                fitting = [m for m, entry in MODELS.items() if entry.learns in kinds]
                real = [m for m in fitting if not is_replay(m)]
                raise UserError(
                    f"learn.data: {name} cannot learn {learn.data}; models that can: "
                    + ", ".join(real[:_SHOWN])
                    + (", ..." if len(real) > _SHOWN else "")
                )
        for world_size in self.worlds if learn.batch_sizes is not None else ():
            if world_size != len(learn.batch_sizes):
                raise UserError(
                    f"learn.batch_sizes: must have one number for each of {world_size} workers, "
                    f"got {len(learn.batch_sizes)}"
                )
        if learn.epochs is not None and len(set(learn.batch_sizes or ())) > 1:
            raise UserError(
                "learn.batch_sizes: with learn.epochs, ranks would make different numbers of steps "
                "and wait for each other; use learn.budget_s"
            )
        scale = (self.cluster and self.cluster.time_scale) or 1.0
        predicted = self.cluster is not None and self.cluster.kind == "predicted"
        if not predicted and learn.epochs is None and self.timeout_s <= scale * learn.budget_s:
            raise UserError(
                f"timeout_s: {self.timeout_s:g} s leave no time for learn.budget_s="
                f"{learn.budget_s:g}" + (f" at time scale {scale:g}" if scale != 1.0 else "")
            )

    def _check_cluster(self) -> None:
        profiles = [network_profile(name) for name in self.networks]
        if self.cluster is None:
            for key in ("networks", "faults"):
                if getattr(self, key):
                    raise UserError(f"{key}: need virtual hosts; add `cluster: {{hosts: 4}}`")
            if self.measure.repeats_at_2k:
                raise UserError("measure.repeats_at_2k: only virtual hosts have a time scale")
            return
        for profile in profiles or [network_profile(self.cluster.network)]:
            profile.check_hosts(-(-max(self.worlds) // self.cluster.ranks_per_host))
            check_links(self.cluster.links, [profile])
            if profile.trace and any(f.kind == "link_rate" for f in self.faults):
                raise UserError(
                    f"faults: link_rate: network {profile.name!r} has a trace, which sets the rates"
                )
        if self.hostfile is not None:
            raise UserError("hostfile: an emulated cluster makes its own hosts; leave hostfile out")
        if self.launcher == "slurm":
            raise UserError("launcher: slurm does not run on virtual hosts; use ssh or mpirun")
        if self.device != "cpu":
            raise UserError("device: virtual hosts share this machine's CPUs; use device: cpu")
        is_predicted = self.cluster.kind == "predicted"
        if is_predicted and self.measure != MeasureConfig():
            raise UserError("measure: a predicted cluster has nothing to measure; leave it out")
        if is_predicted and self.backend is not None:
            raise UserError("backend: a predicted cluster has none; use cluster.engine")
        for each in dataclasses.fields(self) if is_predicted else ():
            if each.name in MEASURED_ONLY and getattr(self, each.name) != each.default:
                raise UserError(f"{each.name}: a predicted cluster runs nothing; leave it out")
        slots = self.cluster.hosts * self.cluster.ranks_per_host
        if max(self.worlds) > slots and not is_predicted:  # it has as many hosts as needed
            raise UserError(
                f"world_sizes: {max(self.worlds)} workers do not fit on {self.cluster.hosts} hosts "
                f"with {self.cluster.ranks_per_host} ranks each"
            )
        for choice in self.models:
            replayed = is_replay(choice.name)
            check_scale(replayed, self.learn is not None, self.cluster.time_scale)
            if self.measure.repeats_at_2k and not replayed:
                raise UserError(
                    f"measure.repeats_at_2k: {choice.name} computes for real; "
                    "allowed: replayed models (MODEL@DEVICE)"
                )
            for fault in self.faults:
                check_fault(
                    fault,
                    hosts=self.cluster.hosts,
                    ranks_per_host=self.cluster.ranks_per_host,
                    world_size=min(self.worlds),
                    replayed=replayed,
                )

    @property
    def worlds(self) -> tuple[int, ...]:
        """The world sizes to run."""
        if self.world_sizes is not None:
            return self.world_sizes
        if self.cluster is not None:
            return (self.cluster.hosts * self.cluster.ranks_per_host,)
        return (2,)

    @property
    def worker_env(self) -> dict[str, str]:
        """Environment variables of the workers, which say where the data are."""
        path = self._data_path()
        return {} if path is None else {datasets.SOURCES[self.learn.data].variable: str(path)}

    def _data_path(self) -> Path | None:
        if self.learn is None or self.learn.data is None:
            return None
        return datasets.path_of(self.learn.data, self.data_dir)

    @functools.cached_property
    def _chosen(self) -> list[tuple[AlgorithmChoice, Options]]:
        return [(a, algorithm_options(a.name, a.options)) for a in self.algorithms]

    @property
    def base(self) -> str:
        """Label of the algorithm to which speed-ups are relative.

        Raises:
            UserError: `compare_to` names none of the algorithms, or several variants of one.
        """
        if self.compare_to is None:
            return self.algorithms[0].title
        variants = [(choice.title, choice.name) for choice in self.algorithms]
        index = base_among(self.compare_to, variants)
        if index is None:
            raise unknown(
                "compare_to", self.compare_to, {text for pair in variants for text in pair}
            )
        return variants[index][0]

    def trials(self, data_digest: str | None = None) -> list[Trial]:
        """Returns all trials, ordered by model and network; the single worker comes first.

        Trials that differ only in their label are allowed; they show how far equal trials differ.

        Args:
            data_digest: digest of the data set, if its files are not on this machine; None: it is
                computed from the files.
        """
        if self.learn is None or self.learn.data is None:
            data_digest = None
        elif data_digest is None:
            data_digest = datasets.digest(self.learn.data, self._data_path())
        hosts = read_hostfile(Path(self.hostfile), 0) if self.hostfile is not None else None
        envs = None
        if self.launcher != "local":
            options = launcher_options(self.launcher, self.launcher_options)
            envs = read_envs().used(options) or None
        digests = Sources(
            data_digest=data_digest, hosts_digest=hosts and digest_of_hosts(hosts), envs=envs
        )
        alone = AlgorithmChoice(name=BASELINE, label="single worker"), Options()
        trials = []
        for model in self.models:
            for network in self._networks():
                if self.baseline:
                    trials.append(self._trial(*alone, model, 1, network, None, digests))
                for world_size in self.worlds:
                    for fault in (None, *self.faults):
                        place = (model, world_size, network, fault, digests)
                        trials += [self._trial(*chosen, *place) for chosen in self._chosen]
        seen: dict[str, list[str]] = {}
        for index, trial in enumerate(trials):
            labels = seen.setdefault(trial.hash, [])
            if trial.label in labels:
                raise UserError(f"{trial.title} is twice in the experiment")
            trials[index] = dataclasses.replace(trial, twin=len(labels))
            labels.append(trial.label)
        return trials

    @functools.cached_property
    def _ranks_of_a_machine(self) -> int:
        """Largest number of ranks on one machine; virtual hosts are on one."""
        most = max(self.worlds)
        if self.hostfile is not None:
            return min(most, max(host.slots for host in read_hostfile(Path(self.hostfile), 0)))
        options = launcher_options(self.launcher, self.launcher_options)
        if (nodes := getattr(options, "nnodes", None)) is not None:
            return math.ceil(most / nodes)
        return min(most, getattr(options, "tasks_per_node", None) or most)

    @property
    def fallback(self) -> str | None:
        """Reason why trials run over Gloo if the experiment does not name a backend, or None."""
        if self.backend is not None or self._default_backend != "gloo":
            return None
        return f"trials run over gloo: {missing_comm_core()}; {BUILD}"

    @functools.cached_property
    def _default_backend(self) -> str:
        if self.device == "cuda":
            return "nccl"
        return "comm_core" if missing_comm_core() is None else "gloo"

    def _networks(self) -> tuple[str | None, ...]:
        if self.cluster is None:
            return (None,)
        return self.networks or (self.cluster.network,)

    def _trial(
        self,
        algorithm: AlgorithmChoice,
        options: Options,
        model: ModelChoice,
        world_size: int,
        network: str | None,
        fault: Fault | None,
        digests: Sources,
    ) -> Trial:
        entry = model_entry(model.name)
        cores = usable_cores()
        threads = self.threads_per_rank or max(1, cores // self._ranks_of_a_machine)
        learn = self.learn
        if learn is not None and algorithm.name == BASELINE:
            learn = dataclasses.replace(learn, batch_sizes=None)  # one worker
        batch_size = model.batch_size or entry.batch_size
        profile = None
        if is_replay(model.name):
            profile = profile_of(model.name, batch_size, model.sentence_len).digest
        return Trial(
            **{key: getattr(self, key) for key in _AS_GIVEN},
            launcher_options={
                key: value
                for key, value in self.launcher_options.items()
                if key not in administrative(self.launcher)
            },
            algorithm=algorithm.name,
            options=options,
            model=model.name,
            batch_size=batch_size,
            sentence_len=sentence_len(model.name, model.sentence_len, batch_size),
            world_size=world_size,
            backend=self.backend or self._default_backend,
            threads_per_rank=threads,
            label=algorithm.title,
            network=network,
            ranks_per_host=self.cluster.ranks_per_host if self.cluster else None,
            time_scale=self.cluster.time_scale if self.cluster else None,
            fault=fault,
            learn=learn,
            cuda=Cuda(tf32=self.tf32, cudnn_benchmark=self.cudnn_benchmark),
            sources=dataclasses.replace(
                digests,
                profile_digest=profile,
                network_digest=self.cluster.links_digest(network) if self.cluster else None,
                plugin=plugin_of(algorithm.name),
                brought=brought_of(model.name, batch_size),
            ),
        )


_SHOWN = 8
_MOST_THREADS = 1 << 12
_LARGEST_SEED = (1 << 32) - 1
_AS_GIVEN = ("launcher", "device", "dtype", "seed", "optimizer", "measure")
_AS_GIVEN += ("collective_timeout_s",)
