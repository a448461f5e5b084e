"""Chrome trace of torch.profiler (Kineto): the events from which a layer profile follows.

Times are microseconds, as in the file. Imports no torch.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dear.errors import UserError

MODULE = "nn.Module: "
"""Start of the name of a module's call; class and number follow, as in `nn.Module: Linear_0`."""
RECORD = "record it with torch.profiler.profile(record_shapes=True, with_stack=True)"
_OPERATION, _PYTHON, _RANGE = "cpu_op", "python_function", "user_annotation"
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_COMMUNICATION = ("nccl", "rccl")
"""Starts of the names of kernels that transfer data to other ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Interval of a thread."""

    name: str
    start: float
    end: float
    thread: object
    args: dict[str, Any]

    @property
    def sequence(self) -> int | None:
        """Number of the autograd node that an operation of the forward pass creates, or that an
        operation of the backward pass runs; None: no such node."""
        number = self.args.get("Sequence number", -1)
        # Nodes that accumulate gradients have the largest number of 64 bits, signed or unsigned.
        return number if 0 <= number < 2**63 - 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Computation of the device: a kernel of the GPU, or an operation of the CPU."""

    start: float
    end: float
    thread: object
    """Thread that launched it."""
    launched: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Events of one process, each list by start."""

    path: Path
    device_name: str | None
    """Name of the GPU; None if nothing ran on a GPU."""
    operations: list[Event]
    calls: list[Event]
    """Calls of modules: Python functions whose names begin with `MODULE`."""
    ranges: list[Event]
    """Ranges of `record_function`, of profiled steps and of optimizers."""
    work: list[Work]

    def error(self, text: str) -> UserError:
        return UserError(f"trace {self.path}: {text}")


def load(path: Path) -> Trace:
    """Reads a trace from JSON, compressed or not.

    Raises:
        UserError: the file is not a trace, is cut off, or contains several processes or GPUs.
    """
    content = _content(path)
    events: dict[str, list[Event]] = {}
    processes = set()
    for raw in content["traceEvents"]:
        category = raw.get("cat") if isinstance(raw, dict) and raw.get("ph") == "X" else None
        if category is None or (
            # Most events of a trace with stacks are other functions.
            category == _PYTHON and not str(raw.get("name")).startswith(MODULE)
        ):
            continue
        try:
            start = float(raw["ts"])
            event = Event(
                name=raw["name"],
                start=start,
                end=start + float(raw["dur"]),
                thread=raw["tid"],
                args=raw.get("args", {}),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"trace {path}: an event of {category} is invalid: {error!r}") from None
        events.setdefault(category, []).append(event)
        if category == _OPERATION:
            processes.add(raw.get("pid"))
    if _OPERATION not in events:
        raise UserError(f"trace {path}: has no operation of torch (category cpu_op); {RECORD}")
    if len(processes) > 1:
        raise UserError(
            f"trace {path}: mixes {len(processes)} processes; give the trace of one rank"
        )
    for some in events.values():
        some.sort(key=lambda event: (event.start, -event.end))
    operations = events[_OPERATION]
    kernels = [e for kind in _GPU for e in events.get(kind, ()) if not _communicates(e)]
    return Trace(
        path=path,
        device_name=_gpu_name(path, content, kernels),
        operations=operations,
        calls=events.get(_PYTHON, []),
        ranges=events.get(_RANGE, []),
        work=_launched(path, kernels, events) if kernels else _computed(operations),
    )


def _content(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        content = json.loads(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"trace {path}: the gzip file is cut off or damaged: {error}") from None
    except OSError as error:
        raise UserError(f"trace {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"trace {path}: not JSON, or cut off: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise UserError(
            f"trace {path}: not a trace of torch.profiler (no list traceEvents); write it with "
            "export_chrome_trace"
        )
    return content


def _communicates(kernel: Event) -> bool:
    return kernel.name.startswith(_COMMUNICATION)


def _gpu_name(path: Path, content: dict[str, Any], kernels: Sequence[Event]) -> str | None:
    devices = {kernel.args.get("device") for kernel in kernels}
    if len(devices) > 1:
        raise UserError(f"trace {path}: has kernels of {len(devices)} GPUs; give one rank's trace")
    for entry in content.get("deviceProperties", ()):
        if entry.get("id") in devices:
            return entry["name"]
    return "unknown GPU" if kernels else None


def outermost(events: Iterable[Event]) -> list[Event]:
    """Returns the events inside no other event of their thread; `events` are in order of start."""
    until: dict[object, float] = {}
    kept = []
    for event in events:
        if event.end > until.get(event.thread, float("-inf")):
            until[event.thread] = event.end
            kept.append(event)
    return kept


def _computed(operations: Sequence[Event]) -> list[Work]:
    return [
        Work(start=event.start, end=event.end, thread=event.thread, launched=event.start)
        for event in outermost(operations)
    ]


def _launched(path: Path, kernels: Sequence[Event], events: dict[str, list[Event]]) -> list[Work]:
    """Returns the kernels whose launch is in the trace, in the order in which they run.

    The operation that launched a kernel has the same `External id`; the call of CUDA in this
    operation has the same `correlation`.
    """
    by_call: dict[object, Event] = {}
    for category, some in events.items():
        if category not in _GPU:
            by_call.update((e.args["correlation"], e) for e in some if "correlation" in e.args)
    by_operation = {e.args["External id"]: e for e in events[_OPERATION] if "External id" in e.args}
    work = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        call = by_call.get(kernel.args.get("correlation"))
        launch = by_operation.get(kernel.args.get("External id"))
        # Older versions of torch count calls in `External id`; it may be another operation's.
        if launch is None or (call and not launch.start <= call.start < launch.end):
            launch = call
        if launch is not None:  # others were launched before the trace began
            work.append(
                Work(
                    start=kernel.start,
                    end=kernel.end,
                    thread=launch.thread,
                    launched=launch.start,
                )
            )
    if not work:
        raise UserError(
            f"trace {path}: no kernel has a launch (correlation, External id); record CPU and CUDA "
            "activities"
        )
    return work
