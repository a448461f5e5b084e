"""One trial by environment variables, as the launch scripts of the references take them.

`dear/horovod_mpi_cj.sh` runs this file. `dear.algorithms.aliases` says what a method's variables
mean; here is where its ranks run: on the hosts of `configs/cluster$nworkers`, on this machine, or
with `cluster=emulated` on virtual hosts of it, or with `nnodes`, `node_rank` and `master` on nodes
of which each is started by hand. What cannot be is said before anything starts.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from common import machine
from common.harness import cli
from common.harness.verbs import Status
from common.launch.hosts import Host, read_envs, read_hostfile
from common.machine.cgroups import usable_cores
from common.models.registry import MODELS, profile_of
from common.paths import CONFIGS
from dear.algorithms import aliases
from dear.errors import UserError, one_of, unknown

NETWORKS = {"0": "10gbe", "1": "100gbib", "2": "100gbe"}
"""Network of each value of `rdma` on virtual hosts: Ethernet, InfiniBand, TCP over its cards."""
DEFAULTS = {"method": "dear", "dnn": "resnet50", "bs": "64", "nworkers": "8", "senlen": "64"}
DEFAULTS |= {"rdma": "0", "cluster": "", "ngpu_per_node": "", "WFSGD_TIMELINE": ""}
DEFAULTS |= {"nnodes": "", "node_rank": "", "master": ""}
"""Variables that say nothing of a method, with the references' defaults. `cluster`, `nnodes` and
`master` are our own."""
_KNOWN = {*DEFAULTS, *aliases.VARIABLES}
_WAYS = (
    "write your hosts into configs/cluster{n}, say cluster=emulated (virtual hosts here), or start "
    "each node by hand with nnodes=, node_rank= and master="
)


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the trial; `arguments` are further ones of `benchmarks.py run`. The exit status."""
    planned = any(word in ("-n", "--dry-run") for word in arguments)
    try:
        flags, words = trial_flags(environ, planned)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return Status.USER_ERROR
    print(words, file=sys.stderr)
    how = ("--rerun", "all", "--stream", "--no-plot")
    return cli.main(["run", "reference", *flags, *how, *arguments])


def trial_flags(environ: Mapping[str, str], planned: bool = False) -> tuple[list[str], str]:
    """Flags of `benchmarks.py run` for the trial, and a line on where it runs.

    Args:
        planned: the trial will not run, so its hosts may be unknown here.

    Raises:
        UserError: a value that is none, a combination that cannot be, or no place for the ranks.
    """
    _refuse_misspelled(environ)
    given = {name: environ.get(name) or default for name, default in DEFAULTS.items()}
    numbers = {name: _whole(given, name) for name in ("nworkers", "bs", "senlen")}
    if given["rdma"] not in NETWORKS:
        raise unknown("rdma", given["rdma"], NETWORKS)
    given_here = {name: environ[name] for name in aliases.VARIABLES if name in environ}
    algorithm, options = aliases.method(given["method"], given_here)
    usual = aliases.method(given["method"], {})[1]
    changed = [f"{key}={value}" for key, value in options.items() if usual.get(key) != value]
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
        one_of("cluster", given["cluster"], {"emulated": ""})
        model["name"] = _replayed(given["dnn"])
        place, words = _emulated(given, numbers["nworkers"])
    else:
        place, words = _real(given, numbers["nworkers"], planned)
    if not given["cluster"] and _gpus():
        place["device"] = "cuda"  # as there
    values |= {"models": [model], **place}
    flags = [f"--set={key}={json.dumps(value)}" for key, value in values.items()]
    if given["WFSGD_TIMELINE"]:
        flags.append(f"--trace={given['WFSGD_TIMELINE']}")
    return flags, words


def _refuse_misspelled(environ: Mapping[str, str]) -> None:
    """Raises `UserError` for a variable in lower case that is nearly one of ours."""
    for name in environ:
        if name.islower() and name not in _KNOWN and get_close_matches(name, _KNOWN, 1, 0.8):
            raise unknown("variable", name, _KNOWN, "see docs/references.md")


def _whole(given: Mapping[str, str], name: str, least: int = 1) -> int:
    if not given[name].isdecimal() or int(given[name]) < least:
        raise UserError(f"{name}={given[name]}: must be a whole number, at least {least}")
    return int(given[name])


def _replayed(dnn: str) -> str:
    """The model as a GPU's profile replays it, where there is one: virtual hosts have no GPU."""
    recorded = [name for name in MODELS if name.startswith(f"{dnn}@")]
    return recorded[0] if recorded else dnn


def _emulated(given: Mapping[str, str], ranks: int) -> tuple[dict[str, Any], str]:
    per_host = _whole(given, "ngpu_per_node") if given["ngpu_per_node"] else 1
    if ranks % per_host:
        raise UserError(f"nworkers={ranks}: ngpu_per_node={per_host} does not divide it")
    cluster = {"hosts": ranks // per_host, "ranks_per_host": per_host}
    cluster["network"] = NETWORKS[given["rdma"]]
    words = f"launcher: {cluster['hosts']} virtual hosts on {cluster['network']}"
    return {"cluster": cluster}, words


def _by_hand(given: Mapping[str, str], nodes: Mapping[str, str]) -> tuple[dict[str, object], str]:
    for name in ("cluster", "ngpu_per_node"):
        if given[name]:
            raise UserError(f"{name}={given[name]}: does not go with {', '.join(nodes)}")
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
            raise UserError(f"ngpu_per_node={per_host}: {path} says otherwise")
    mpirun = shutil.which("mpirun") or read_envs().MPIPATH
    if hosts is None or not (away or mpirun):
        if given["rdma"] != "0":
            raise UserError(f"rdma={given['rdma']}: all workers are on this machine")
        return {"launcher": "local"}, "launcher: local processes"
    launcher = "mpirun" if mpirun else "ssh"
    place: dict[str, Any] = {"launcher": launcher, "hostfile": str(path)}
    if given["rdma"] != "0":
        place["launcher_options"] = {"rdma": int(given["rdma"])}
    words = f"launcher: {launcher} with {path}"
    return place, f"{words}\nbefore it can run: {lost}" if lost else words


def _unknown_hosts(path: Path, ranks: int, away: Sequence[Host]) -> str | None:
    """Returns a sentence on hosts that nobody knows, such as those of the files as they come."""

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
    """Raises `UserError` if it cannot hold so many workers. Slots of a hostfile count as cores."""
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
            f"nworkers={ranks}: so many of {dnn} need {machine.gib(needed)} of memory on this "
            f"machine, and {machine.gib(there)} are available; {_WAYS.format(n=ranks)}"
        )


def _gpus() -> int:
    """NVIDIA's, of this machine."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
