"""What a record is too short for: raw measurements of all ranks, in a file beside the record.

Whoever wants to predict a step, or to doubt a number, finds here what went into it: every moment,
what was sent when, what was built, and what moving and updating cost. `docs/methodology.md` says
what stands where. Nothing of it is taken while steps are timed.
"""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from common.harness.settings import OptimizerConfig
from common.harness.worker.timing.measure import Measured
from common.harness.worker.training import Training, make_optimizer
from common.results.records import Breakdown
from dear.comm.communicator import Communicator
from dear.errors import UserError

SCHEMA = 1
TRACED_STEPS = 3
"""The first begins with nothing under way; the last is as steps are that follow others."""
_SIZES = tuple(4 << power for power in range(10, 23, 2))
"""4 KiB to 4 MiB."""
_REPEATS = 5
_NETWORK = Path("/proc/net")
_COUNTERS = ("RetransSegs", "InSegs", "OutSegs", "TCPTimeouts", "TCPFastRetrans", "TCPLossProbes")


def file_name(repeat: int) -> str:
    """In the trial's folder; the first repeat's has more in it."""
    return f"evidence-{repeat}.json.gz" if repeat else "evidence.json.gz"


def timing(
    measured: Measured, parts: Sequence[Sequence[Breakdown]], counted: Sequence[Any]
) -> dict[str, Any]:
    """Of one repeat, by rank: moments, parts of steps, threads and cores, counters of the network.

    Args:
        parts: by rank, of all steps since the first block.
        counted: by rank, what `network_counters` has gained since then.
    """
    keys = ("forward_s", "backward_s", "update_s", "exposed_comm_s", "step_s")
    steps = sum(len(block) for block in measured.iters + measured.untimed)
    rows = [[[getattr(s, key) for key in keys] for s in rank[:steps]] for rank in parts]
    return {
        "marks_s": measured.marks,
        "parts": {"columns": keys, "ranks": rows},
        "pressure": [asdict(one) for one in measured.pressure],
        "network": {"steps": steps, "ranks": counted},
    }


def learning(saved: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Of one repeat that learns, by rank (None: it has died): when copies were made, threads and
    cores, counters of the network.

    Args:
        saved: as `learning` takes it from the ranks' files.
    """

    def of_all(told: Callable[[dict[str, Any]], Any]) -> list[Any]:
        return [rank and told(rank) for rank in saved]

    return {
        "copies": of_all(lambda rank: [[one["seconds"], one["steps"]] for one in rank["taken"]]),
        "pressure": of_all(lambda rank: rank["pressure"]),
        "network": {
            "steps": of_all(lambda rank: rank["steps"]),
            "ranks": of_all(lambda rank: rank["network"]),
        },
    }


def write(path: Path, facts: dict[str, Any]) -> None:
    """Writes the file, whole or not at all."""
    partial = path.with_suffix(".partial")
    with gzip.open(partial, "wt") as file:
        json.dump({"schema": SCHEMA, **facts}, file)
    partial.replace(path)


class Trace:
    """When gradients arrived and what was sent in some further steps, on this rank.

    Trains them; every rank does.
    """

    def __init__(
        self, training: Training, model: torch.nn.Module, communicator: Communicator
    ) -> None:
        self._gradients: list[list[dict[str, Any]]] = []
        named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        handles = [param.register_hook(self._watch(name)) for name, param in named]
        self._marks = [_now()]
        training.forget_parts()
        with communicator.logged() as self._log:
            for _ in range(TRACED_STEPS):
                self._gradients.append([])
                training.step()
                self._marks.append(_now())
        training.finish()
        self._phases = training.phases()
        for handle in handles:
            handle.remove()

    def _watch(self, name: str) -> Callable[[torch.Tensor], None]:
        def arrived(gradient: torch.Tensor) -> None:
            self._gradients[-1].append({"name": name, "bytes": gradient.nbytes, "at_s": _now()})

        return arrived

    def told(self) -> dict[str, Any]:
        """All of it, once nothing is under way any more."""
        return {
            "marks_s": self._marks,
            "phases_s": self._phases,
            "waits_s": self._log.waits,
            "gradients": self._gradients,
            "collectives": [_collective(*one) for one in self._log.started],
            "transfers": _transfers(self._marks[0], self._marks[-1]),
        }


def _collective(name: str, channel: int, work: Any) -> dict[str, Any]:
    try:
        found = work.times()
        times = {key: getattr(found, key) for key in ("enqueued_s", "started_s", "finished_s")}
    except UserError:  # this backend does not tell, as of messages between two
        times = {}
    return {"name": name, "channel": channel, "bytes": work.nbytes, **times}


def _transfers(since_s: float, until_s: float) -> list[dict[str, Any]]:
    """What the comm core has moved, for whomever: DDP's buckets do not come by a communicator."""
    core = sys.modules.get("comm_core")
    events = core.events() if core is not None else []
    return [
        {key: _plain(value) for key, value in event.items()}
        for event in events
        if since_s <= event["enqueued_s"] <= until_s
    ]


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool)) else str(value)


def plan(training: Training, model: torch.nn.Module) -> dict[str, Any]:
    """What travels together, in the order in which it is started, as it was in the end."""
    names = {param: name for name, param in model.named_parameters()}
    some = training.some_groups()
    groups = [
        {
            "bytes": nbytes,
            "parameters": [names.get(param, "") for param in params],
            "some": None if some is None else place in some,
        }
        for place, (nbytes, params) in enumerate(training.groups())
    ]
    return {"groups": groups, "statistics": training.statistics()}


def host_costs(
    config: OptimizerConfig, device: torch.device, dtype: torch.dtype
) -> list[dict[str, float]]:
    """By bytes of a tensor: seconds of this machine to copy it, and for the optimizer's update.

    All ranks at once, as in a step. On a GPU that includes one launch, and waiting for its end.
    """
    found = []
    for nbytes in _SIZES:
        module = torch.nn.Module()
        zeros = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        module.param = torch.nn.Parameter(zeros)
        module.param.grad = torch.ones_like(module.param)
        target, optimizer = torch.empty_like(module.param), make_optimizer(config, module)
        copy_s = _median_s(lambda t=target, m=module: t.copy_(m.param.grad), device)
        update_s = _median_s(optimizer.step, device)
        found.append({"bytes": nbytes, "copy_s": copy_s, "update_s": update_s})
    return found


def _median_s(call: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(1 + _REPEATS):
        began = _finished_s(device)
        with torch.no_grad():
            call()
        times.append(_finished_s(device) - began)
    return statistics.median(times[1:])  # the first touches the memory


def network_counters() -> dict[str, Any]:
    """What this rank's host has counted so far: by device, of TCP, and of queues that shape."""
    found: dict[str, Any] = {}
    for line in _lines("dev")[2:]:
        name, _, values = line.partition(":")
        numbers = [int(value) for value in values.split()]
        keys = ("rx_bytes", "rx_packets", "rx_errors", "rx_drop")
        found[name.strip()] = dict(zip(keys, numbers[:4], strict=True))
        keys = ("tx_bytes", "tx_packets", "tx_errors", "tx_drop")
        found[name.strip()] |= dict(zip(keys, numbers[8:12], strict=True))
    found["tcp"] = {}
    for lines in (_lines("snmp"), _lines("netstat")):
        for head, values in zip(lines[::2], lines[1::2], strict=True):
            if head.startswith("Tcp"):
                pairs = zip(head.split()[1:], map(int, values.split()[1:]), strict=True)
                found["tcp"] |= {key: value for key, value in pairs if key in _COUNTERS}
    found["queues"] = _queues()
    return found


def _lines(name: str) -> list[str]:
    path = _NETWORK / name
    return path.read_text().splitlines() if path.exists() else []


def _queues() -> dict[str, dict[str, int]]:
    """By device and kind, what `tc -s` counts of this host's end of its links; {} without `tc`."""
    tool = shutil.which("tc")
    if tool is None:
        return {}
    command = [tool, "-s", "-j", "qdisc", "show"]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        return {}
    kept = ("bytes", "packets", "drops", "overlimits", "requeues", "backlog")
    return {
        f"{queue.get('dev', '')} {queue['kind']}": {key: queue[key] for key in kept if key in queue}
        for queue in json.loads(told.stdout or "[]")
    }


def gained(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What counters (nested) have gained; of those that were there before."""
    return {
        key: gained(before[key], value) if isinstance(value, dict) else value - before[key]
        for key, value in after.items()
        if key in before
    }


def _finished_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _now()


def _now() -> float:
    return time.perf_counter()
