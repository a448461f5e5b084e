"""Evidence: raw measurements of all ranks, in a file beside the record.

`docs/methodology.md` lists its keys. Nothing is traced while steps are timed.
"""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from common.harness.settings import OptimizerConfig
from common.harness.worker.timing.measure import Measured
from common.harness.worker.training import Training, make_optimizer
from common.results.records import Breakdown
from dear.comm.communicator import Communicator
from dear.comm.handles import Noted
from dear.comm.work import Work
from dear.errors import UserError

SCHEMA = 1
TRACED_STEPS = 3
"""Number of traced steps. The first starts with nothing in flight; the last is typical."""
Json = dict[str, Any]
Counters = dict[str, Any]
"""Nested counters, as JSON."""
_PARTS = ("forward_s", "backward_s", "update_s", "exposed_comm_s", "step_s")
_SIZES = tuple(4 << power for power in range(10, 23, 2))
"""4 KiB to 16 MiB."""
_REPEATS = 5
_NETWORK = Path("/proc/net")
_TCP = ("RetransSegs", "InSegs", "OutSegs", "TCPTimeouts", "TCPFastRetrans", "TCPLossProbes")
_DEVICE = ("bytes", "packets", "errors", "drop")
_QUEUE = ("bytes", "packets", "drops", "overlimits", "requeues", "backlog")


def file_name(repeat: int) -> str:
    """Returns the name of the file in the trial's folder."""
    return f"evidence-{repeat}.json.gz" if repeat else "evidence.json.gz"


def timing(
    measured: Measured,
    parts: Sequence[Sequence[Breakdown]],
    counted: Sequence[Counters],
    watched: int,
) -> Json:
    """Returns the evidence of timed steps.

    Args:
        parts: parts of all steps since the first block, by rank.
        counted: increase of `network_counters` since then, by rank.
        watched: number of further steps since then, which were not timed.
    """
    steps = sum(len(block) for block in measured.iters + measured.untimed)
    rows = [[[getattr(s, key) for key in _PARTS] for s in rank[:steps]] for rank in parts]
    return {
        "marks_s": measured.marks,
        "parts": {"columns": _PARTS, "ranks": rows},
        "pressure": [asdict(pressure) for pressure in measured.pressure],
        "network": {"steps": steps + watched, "ranks": counted},
    }


def learning(saved: Sequence[Mapping[str, Any] | None]) -> Json:
    """Returns the evidence of a training trial, from the ranks' files (None: the rank died)."""
    return {
        "copies": [rank and [[t["seconds"], t["steps"]] for t in rank["taken"]] for rank in saved],
        "pressure": [rank and rank["pressure"] for rank in saved],
        "network": {
            "steps": [rank and rank["steps"] for rank in saved],
            "ranks": [rank and rank["network"] for rank in saved],
        },
    }


def write(path: Path, facts: Json) -> None:
    """Writes the file atomically."""
    partial = path.with_suffix(".partial")
    with gzip.open(partial, "wt", encoding="utf-8") as file:
        json.dump({"schema": SCHEMA, **facts}, file)
    partial.replace(path)


class Trace:
    """Trace of some further steps on this rank: when gradients were ready, and when transfers ran.

    All ranks must create it together.
    """

    def __init__(
        self, training: Training, model: torch.nn.Module, communicator: Communicator
    ) -> None:
        self._gradients: list[list[Json]] = []
        self._moment = moments(communicator, training.device)
        named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        handles = [param.register_hook(self._watch(name)) for name, param in named]
        self._marks = [self._moment()]
        training.forget_parts()
        with communicator.logged() as self._log:
            for _ in range(TRACED_STEPS):
                self._gradients.append([])
                training.step()
                self._marks.append(self._moment())
        training.finish()
        self._phases = training.phases()
        for handle in handles:
            handle.remove()

    def _watch(self, name: str) -> Callable[[torch.Tensor], None]:
        def arrived(gradient: torch.Tensor) -> None:
            entry = {"name": name, "bytes": gradient.nbytes, "at_s": self._moment()}
            self._gradients[-1].append(entry)

        return arrived

    def to_json(self) -> Json:
        """Returns the trace; nothing may be in flight."""
        marks_s = [moment() for moment in self._marks]
        return {
            "marks_s": marks_s,
            "phases_s": self._phases,
            "waits_s": self._log.waits,
            "gradients": [
                [{**entry, "at_s": entry["at_s"]()} for entry in step] for step in self._gradients
            ],
            "collectives": [_collective(*started) for started in self._log.started],
            "transfers": _transfers(marks_s[0], marks_s[-1]),
        }


def moments(communicator: Communicator, device: torch.device) -> Callable[[], Callable[[], float]]:
    """Returns a function `mark`, which notes the time when the device reaches this point.

    `mark` does not wait. It returns a function that returns this time in seconds later.
    """
    if device.type == "cuda":
        return communicator.device_clock(device).mark

    def mark() -> Callable[[], float]:
        now_s = _now()
        return lambda: now_s

    return mark


def _collective(name: str, channel: int, work: Work | Noted) -> Json:
    try:
        moments = work.times()
        times = {key: getattr(moments, key) for key in ("enqueued_s", "started_s", "finished_s")}
    except UserError:  # this backend reports no times, such as those of messages between two ranks
        times = {}
    return {"name": name, "channel": channel, "bytes": work.nbytes, **times}


def _transfers(since_s: float, until_s: float) -> list[Json]:
    """Returns all transfers of the comm core, also DDP's, which do not use the communicator."""
    core = sys.modules.get("comm_core")
    events = core.events() if core is not None else []
    return [
        {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in event.items()}
        for event in events
        if since_s <= event["enqueued_s"] <= until_s
    ]


def plan(training: Training, model: torch.nn.Module) -> Json:
    """Returns the current groups of gradients (buckets), in the order in which they start."""
    names = {param: name for name, param in model.named_parameters()}
    some = training.engine.some_groups()
    groups = [
        {
            "bytes": nbytes,
            "parameters": [names.get(param, "") for param in params],
            "some": None if some is None else place in some,
        }
        for place, (nbytes, params) in enumerate(training.engine.groups())
    ]
    return {"groups": groups, "statistics": training.engine.statistics()}


def host_costs(
    config: OptimizerConfig, device: torch.device, dtype: torch.dtype
) -> list[dict[str, float]]:
    """Returns the real seconds to copy and to update a tensor, by its size.

    All ranks measure at the same time, as in a step. On a GPU, the time includes the launch of a
    kernel and the wait for its end.
    """
    costs = []
    for nbytes in _SIZES:
        module = torch.nn.Module()
        zeros = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        module.param = param = torch.nn.Parameter(zeros)
        param.grad = torch.ones_like(param)
        target, optimizer = torch.empty_like(param), make_optimizer(config, module)
        copy_s = _median_s(lambda t=target, p=param: t.copy_(p.grad), device)
        update_s = _median_s(optimizer.step, device)
        costs.append({"bytes": nbytes, "copy_s": copy_s, "update_s": update_s})
    return costs


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(1 + _REPEATS):
        began = _finished_s(device)
        with torch.no_grad():
            call()
        times.append(_finished_s(device) - began)
    return statistics.median(times[1:])  # the first touches new memory


def network_counters() -> Counters:
    """Returns counters of this rank's host: network devices, TCP, and queues that limit links."""
    counters: Counters = {"tcp": {}, "queues": _queues()}
    for line in _lines("dev")[2:]:
        name, _, values = line.partition(":")
        numbers = [int(value) for value in values.split()]
        counters[name.strip()] = {
            f"{way}_{key}": number
            for way, counts in (("rx", numbers[:4]), ("tx", numbers[8:12]))
            for key, number in zip(_DEVICE, counts, strict=True)
        }
    for lines in (_lines("snmp"), _lines("netstat")):
        for head, values in zip(lines[::2], lines[1::2], strict=True):
            if head.startswith("Tcp"):
                pairs = zip(head.split()[1:], map(int, values.split()[1:]), strict=True)
                counters["tcp"] |= {key: value for key, value in pairs if key in _TCP}
    return counters


def _lines(name: str) -> list[str]:
    path = _NETWORK / name
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _queues() -> dict[str, dict[str, int]]:
    tool = shutil.which("tc")
    if tool is None:
        return {}
    command = [tool, "-s", "-j", "qdisc", "show"]
    shown = subprocess.run(command, capture_output=True, text=True)
    if shown.returncode:
        return {}
    return {
        f"{queue.get('dev', '')} {queue['kind']}": {k: queue[k] for k in _QUEUE if k in queue}
        for queue in json.loads(shown.stdout or "[]")
    }


def gained(before: Counters, after: Counters) -> Counters:
    """Returns the increase of each counter in `before`."""
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
