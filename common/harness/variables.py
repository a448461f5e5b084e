"""One trial by environment variables, as the launch scripts of the references take them.

`dear/horovod_mpi_cj.sh` runs such a trial of `reference.yaml`. `dear.algorithms.aliases` translates
the variables of a method. This file translates the others, and finds hosts for the ranks:

- the hosts of `configs/cluster$nworkers`, or this machine;
- with `cluster=emulated` virtual hosts on this machine;
- with `cluster=predicted` none: the steps are computed;
- with `nnodes`, `node_rank` and `master`, nodes that are each started by hand.

Wrong values raise an error before anything starts. `command` goes the other way: it returns the
variables and flags that make a trial of any experiment.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from common import machine
from common.harness.experiment import Experiment, ModelChoice
from common.harness.experiment_file import find_experiment, load
from common.harness.trial import Trial
from common.launch.hosts import Host, read_envs, read_hostfile
from common.launch.mpirun import find_mpirun
from common.machine.cgroups import usable_cores
from common.models.registry import MODELS, profile_of
from common.paths import CONFIGS
from common.profiling import gpus
from common.results.exports.reference_reports import variables
from dear.algorithms import aliases
from dear.errors import UserError, one_of, unknown
from dear.training.algorithm import algorithm_options

NETWORKS = {"0": "10gbe", "1": "100gbib", "2": "100gbe"}
"""Network of each value of `rdma` on virtual hosts: Ethernet, InfiniBand, TCP over its cards."""
PREDICTED = "predicted"
CLUSTERS = ("emulated", PREDICTED)
"""Values of `cluster`."""
DEFAULTS = {"method": "dear", "dnn": "resnet50", "bs": "64", "nworkers": "8", "senlen": "64"}
DEFAULTS |= {"rdma": "0", "cluster": "", "ngpu_per_node": "", "WFSGD_TIMELINE": ""}
DEFAULTS |= {"nnodes": "", "node_rank": "", "master": ""}
"""Variables that do not concern a method, with the references' defaults. `cluster`, `nnodes` and
`master` are our own."""
_KNOWN = {*DEFAULTS, *aliases.VARIABLES}
_WAYS = (
    "write your hosts into configs/cluster{n}, say cluster=emulated (virtual hosts here) or "
    "cluster=predicted (computed steps), or start each node by hand with nnodes=, node_rank= and "
    "master="
)


def trial_flags(environ: Mapping[str, str], planned: bool = False) -> tuple[list[str], str]:
    """Returns the flags of `benchmarks.py run` for the trial, and a line on where it runs.

    Args:
        planned: the trial will not run, so its hosts may be unknown here.

    Raises:
        UserError: a wrong value, a combination that is impossible, or no hosts for the ranks.
    """
    _refuse_misspelled(environ)
    given = {name: environ.get(name) or default for name, default in DEFAULTS.items()}
    numbers = {name: _whole(given, name) for name in ("nworkers", "bs", "senlen")}
    if given["rdma"] not in NETWORKS:
        raise unknown("rdma", given["rdma"], NETWORKS)
    given_here = {name: environ[name] for name in aliases.VARIABLES if name in environ}
    over_nccl = given["cluster"] == PREDICTED or (not given["cluster"] and _gpus() > 0)
    named = partial(aliases.method, given["method"], limits_credit=not over_nccl)
    algorithm, options = named(given_here)
    usual_algorithm, usual = named({})
    changed = [] if algorithm == usual_algorithm else [algorithm]
    changed += [f"{key}={value}" for key, value in options.items() if usual.get(key) != value]
    label = given["method"] + (f"({','.join(changed)})" if changed else "")
    values: dict[str, Any] = {
        "algorithms": [{"name": algorithm, "label": label, "options": options}],
        "world_sizes": [numbers["nworkers"]],
    }
    model = {"name": given["dnn"], "batch_size": numbers["bs"]}
    if given["dnn"].startswith("bert") or environ.get("senlen"):
        model["sentence_len"] = numbers["senlen"]
    by_hand = {name: given[name] for name in ("nnodes", "node_rank", "master") if given[name]}
    if by_hand:
        place, words = _by_hand(given, by_hand)
    elif given["cluster"]:
        one_of("cluster", given["cluster"], dict.fromkeys(CLUSTERS, ""))
        if given["cluster"] != PREDICTED:
            model["name"] = _replayed(given["dnn"])
        place, words = _emulated(given, numbers["nworkers"])
    else:
        place, words = _real(given, numbers["nworkers"], planned)
    if not given["cluster"] and _gpus():
        place["device"] = "cuda"  # as in the references
    values |= {"models": [model], **place}
    flags = [f"--set={key}={json.dumps(value)}" for key, value in values.items()]
    if given["WFSGD_TIMELINE"]:
        flags.append(f"--trace={given['WFSGD_TIMELINE']}")
    return flags, words


def _refuse_misspelled(environ: Mapping[str, str]) -> None:
    """Raises `UserError` for a variable that is not known, but has nearly the name of a known one.

    Other programs may have variables in capitals, so only unmistakable names are refused there.
    """
    capitals = ("CREDIT_TUNING", "USE_BYTESCHEDULER", "WFSGD_TIMELINE")
    for name in sorted(environ.keys() - _KNOWN):
        if name.islower():
            meant = get_close_matches(name, _KNOWN, 1, 0.8)
        else:
            meant = [name.lower()] if name.lower() in ("method", "dnn", "nworkers") else []
            meant += get_close_matches(name, capitals, 1, 0.9)
        if any(not environ.get(each) for each in meant):
            raise unknown("variable", name, _KNOWN, "see docs/references.md")


def _whole(given: Mapping[str, str], name: str, least: int = 1) -> int:
    if not given[name].isdecimal() or int(given[name]) < least:
        raise UserError(f"{name}={given[name]}: must be a whole number, at least {least}")
    return int(given[name])


def _replayed(dnn: str) -> str:
    """Returns the name of the replayed model, or `dnn` if it has no profile.

    Virtual hosts have no GPU. Of several profiled devices, the default GPU is chosen, so a new
    profile does not change what is run.
    """
    default = f"{dnn}@{gpus.find(gpus.DEFAULT).folder_name}"
    recorded = [default, *(name for name in MODELS if name.startswith(f"{dnn}@"))]
    return next((name for name in recorded if name in MODELS), dnn)


def _emulated(given: Mapping[str, str], ranks: int) -> tuple[dict[str, Any], str]:
    per_host = _whole(given, "ngpu_per_node") if given["ngpu_per_node"] else 1
    if ranks % per_host:
        raise UserError(f"nworkers={ranks}: ngpu_per_node={per_host} does not divide it")
    cluster = {"hosts": ranks // per_host, "ranks_per_host": per_host}
    cluster["network"] = NETWORKS[given["rdma"]]
    if given["cluster"] == PREDICTED:
        words = f"predicted: {cluster['hosts']} hosts on {cluster['network']}"
        return {"cluster": {"kind": PREDICTED, **cluster}, "measure": {}}, words
    words = f"launcher: {cluster['hosts']} virtual hosts on {cluster['network']}"
    return {"cluster": cluster}, words


def _by_hand(given: Mapping[str, str], nodes: Mapping[str, str]) -> tuple[dict[str, object], str]:
    for name in ("cluster", "ngpu_per_node"):
        if given[name]:
            raise UserError(f"{name}={given[name]}: cannot be used with {', '.join(nodes)}")
    if missing := [name for name in ("nnodes", "master") if not given[name]]:
        shown = " ".join(f"{name}={value}" for name, value in nodes.items())
        raise UserError(f"{shown}: nodes that are started by hand need {' and '.join(missing)} too")
    numbers = {name: _whole(given, name, 0) for name in ("node_rank", "rdma") if given[name]}
    options = {"nnodes": _whole(given, "nnodes"), "master": given["master"]}
    options |= {name: number for name, number in numbers.items() if number}
    words = f"launcher: node {numbers.get('node_rank', 0)} of {given['nnodes']}, started by hand"
    return {"launcher": "nodes", "launcher_options": options}, words


def _real(given: Mapping[str, str], ranks: int, planned: bool) -> tuple[dict[str, Any], str]:
    path = CONFIGS / f"cluster{ranks}"
    hosts = read_hostfile(path, ranks) if path.exists() else None
    away = [host for host in hosts or () if not host.here]
    lost = _unknown_hosts(path, ranks, away)
    if lost and not planned:
        raise UserError(lost)
    if not away:
        _check_this_machine(given["dnn"], ranks, hosts)
    if given["ngpu_per_node"]:
        per_host = _whole(given, "ngpu_per_node")
        if any(host.slots != per_host for host in hosts or ()):
            raise UserError(f"ngpu_per_node={per_host}: {path} has other slots")
    mpirun = _has_mpirun()
    if hosts is None or not (away or mpirun):
        if given["rdma"] != "0":
            raise UserError(f"rdma={given['rdma']}: no effect, as all workers are on this machine")
        return {"launcher": "local"}, "launcher: local processes"
    launcher = "mpirun" if mpirun else "ssh"
    place: dict[str, Any] = {"launcher": launcher, "hostfile": str(path)}
    if given["rdma"] != "0":
        place["launcher_options"] = {"rdma": int(given["rdma"])}
    words = f"launcher: {launcher} with {path}"
    if not _gpus():
        words += "; device: cpu, as here is no GPU (--set=device=cuda for those of the hosts)"
    return place, f"{words}\nbefore it can run: {lost}" if lost else words


def _unknown_hosts(path: Path, ranks: int, away: Sequence[Host]) -> str | None:
    """Returns a sentence on hosts whose names cannot be resolved, as in the shipped files."""

    def known(host: Host) -> bool:
        try:
            return bool(socket.getaddrinfo(host.reached_at, None))
        except OSError:
            return False

    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = zip(away, pool.map(known, away), strict=True)
        lost = [host.name for host, is_known in answers if not is_known]
    if not lost:
        return None
    names = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
    ways = _WAYS.format(n=ranks)
    return f"nworkers={ranks}: the hosts of {path} ({names}) cannot be resolved here; {ways}"


def _check_this_machine(dnn: str, ranks: int, hosts: Sequence[Host] | None) -> None:
    """Raises `UserError` if so many workers do not fit; slots of a hostfile count as cores."""
    cores = _gpus() or usable_cores()
    if hosts is None and ranks > cores:
        what = "GPUs" if _gpus() else "cores"
        raise UserError(
            f"nworkers={ranks}: this machine has {cores} {what}, and there is no configs/cluster"
            f"{ranks}; {_WAYS.format(n=ranks)}"
        )
    recorded = _replayed(dnn)
    size = 0
    if "@" in recorded:
        size = profile_of(recorded, MODELS[recorded].batch_size).parameter_bytes
    needed, there = machine.ranks_bytes(size, ranks), machine.available_bytes()
    if needed > there:
        raise UserError(
            f"nworkers={ranks}: the ranks of {dnn} need {machine.gib(needed)} of memory on this "
            f"machine, and {machine.gib(there)} are available; {_WAYS.format(n=ranks)}"
        )


def _has_mpirun() -> bool:
    """Returns whether Open MPI is installed; another MPI's mpirun does not count."""
    prefix = read_envs().MPIPATH
    try:
        find_mpirun(prefix)
    except UserError:
        if prefix:  # somebody wants it
            raise
        return False
    return True


def _gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


EXPERIMENT = "reference"
_OF_THE_SWEEP = ("name", "description", "baseline", "compare_to", "report_lines", "timeout_s")
"""Keys of an experiment that do not change its trials."""


def command(experiment: Experiment, trial: Trial) -> str:
    """Returns the command of `dear/horovod_mpi_cj.sh` that makes a trial of `experiment` again.

    Variables set what they can; `--set` sets all other keys whose values differ.

    Raises:
        UserError: no variables give this trial, at least on this machine.
    """
    if trial.sources.brought is not None:
        raise UserError(f"dnn={trial.model}: the script takes no custom model")
    if trial.twin:
        raise UserError("the trial repeats another one under another label; use that one's command")
    environ = _environ(experiment, trial)
    flags, _ = trial_flags(environ, planned=True)
    reference = load(find_experiment(EXPERIMENT), [flag.removeprefix("--set=") for flag in flags])
    words = [f"{name}={shlex.quote(text)}" for name, text in environ.items()]
    words.append("./horovod_mpi_cj.sh")
    values = _narrowed(experiment, trial)
    if _makes(trial, environ):
        del values["algorithms"]
    for key, value in values.items():
        if value != _plain(getattr(reference, key)):
            words.append(shlex.quote(f"--set={key}={json.dumps(value)}"))
    if trial.learn is not None and reference.report_lines:
        words.append("--set=report_lines=false")
    if trial.fault is not None:  # a sweep with faults has the same trial without a fault, too
        words.append(shlex.quote(f"--filter={trial.fault.title}"))
    return f"cd dear;{' '.join(words)}"


def _environ(experiment: Experiment, trial: Trial) -> dict[str, str]:
    """Returns a trial's variables; leaves out the method's if these give another trial."""
    given = variables(trial.to_json())
    numbers = {name: number for number, name in NETWORKS.items()}
    given["rdma"] = numbers.get(given["rdma"], "0")
    if not _makes(trial, given):
        given = {key: text for key, text in given.items() if key not in aliases.VARIABLES}
    if trial.sentence_len is not None:
        given["senlen"] = str(trial.sentence_len)
    if experiment.cluster is not None:
        given["cluster"] = "emulated"
        if trial.world_size % experiment.cluster.ranks_per_host == 0:
            given["ngpu_per_node"] = str(experiment.cluster.ranks_per_host)
    return given


def _makes(trial: Trial, environ: Mapping[str, str]) -> bool:
    """Returns True if the variables give the trial's algorithm and options."""
    given = {key: text for key, text in environ.items() if key in aliases.VARIABLES}
    try:
        name, options = aliases.method(environ["method"], given)
        return name == trial.algorithm and algorithm_options(name, options) == trial.options
    except UserError:
        return False


def _narrowed(experiment: Experiment, trial: Trial) -> dict[str, Any]:
    """Returns the keys of the experiment, with the values that make this trial alone."""
    values = {
        field.name: getattr(experiment, field.name) for field in dataclasses.fields(Experiment)
    }
    chosen = {choice.title: choice for choice in experiment.algorithms}[trial.label]
    model = ModelChoice(
        name=trial.model, batch_size=trial.batch_size, sentence_len=trial.sentence_len
    )
    values |= {"algorithms": (chosen,), "models": (model,), "world_sizes": (trial.world_size,)}
    values |= {"backend": trial.backend, "threads_per_rank": trial.threads_per_rank}
    values |= {"networks": (), "faults": () if trial.fault is None else (trial.fault,)}
    if experiment.cluster is not None:
        hosts = -(-trial.world_size // experiment.cluster.ranks_per_host)
        values["cluster"] = dataclasses.replace(
            experiment.cluster, network=trial.network, hosts=hosts
        )
    return {key: _plain(value) for key, value in values.items() if key not in _OF_THE_SWEEP}


def _plain(value: Any) -> Any:
    """Returns the value in the form of an experiment file, without keys that have their default.

    The label of an algorithm does not change its trial.
    """
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
        }
        return {k: v for k, v in fields.items() if k != "label" and v != {}}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
