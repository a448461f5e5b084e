"""Recorder: keeps this rank's last operations in files that outlive the process.

`FOLDER/flight-rankR.jsonl` has a line per fact: the rank, each process group, each bucket. The ring
`flight-rankR.core` has the comm core's operations, and `flight-rankR.torch` those that torch's
other backends ran for a `Communicator`. The folder must be the same on all hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dear.lazy import comm_core, dist, torch

VARIABLE = "DEAR_FLIGHT_RECORDER"
"""Environment variable with the folder; without it, no files are written."""
SLOT = struct.Struct("<7Q3d2i20s20s")
"""Operation in a ring, as `FlightSlot` of the comm core: record, group, sequence, bytes and then
addresses of input and output, three times, peer, failed, operation, dtype."""
SLOTS = 1024
STARTED = struct.Struct("<2d")
_STARTED_AT = 64
"""Offset of the last two times in a slot."""

log = logging.getLogger("dear")
_recorder: Recorder | None = None


def path_of(folder: Path, rank: int, kind: str) -> Path:
    """Returns the path of a rank's file: `jsonl`, `core` or `torch`."""
    return folder / f"flight-rank{rank}.{kind}"


class Recorder:
    """Files of this rank. The comm core writes its ring without Python."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder = folder
        self._paths = {kind: path_of(folder, rank, kind) for kind in ("jsonl", "core", "torch")}
        self._facts = self._paths["jsonl"].open("w", encoding="utf-8", buffering=1)
        self._names: dict[int, str] = {}
        self._groups: dict[object, tuple[int, Iterator[int]]] = {}
        self._ring = _new_ring(self._paths["torch"])
        self._records = itertools.count(1)
        offset_ns = time.time_ns() - time.monotonic_ns()
        self._say(rank=rank, size=size, host=socket.gethostname(), offset_ns=offset_ns)
        with contextlib.suppress(ImportError):  # the comm core may not be built
            comm_core.record_flight(str(self._paths["core"]), self.group)

    def _say(self, **fact: object) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason to end the training
            self._facts.write(json.dumps(fact) + "\n")

    def group(self, number: int, name: str, ranks: Sequence[int], library: str) -> None:
        """Notes a process group, whose operations in the ring have `number`."""
        self._say(group=number, name=name, ranks=list(ranks), library=library)

    def parameters(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Notes the names of parameters, for the names of their buckets."""
        self._names.update((id(param), name) for name, param in named)

    def bucket(
        self, params: Sequence[torch.nn.Parameter], buffers: Iterable[torch.Tensor | None]
    ) -> None:
        """Notes the memory of a bucket, by which its operations get its name."""
        name = _common([self._names.get(id(param), "") for param in params])
        for buffer in buffers:
            if name and buffer is not None:
                self._say(bucket=name, at=buffer.data_ptr(), nbytes=buffer.nbytes)

    def note(self, name: str, group: Any, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Records a call of a torch backend; returns a function to call when it has ended.

        Args:
            tensors: the output, if it is separate, and the input.
        """
        if group not in self._groups:
            number, library = len(self._groups), dist.get_backend(group)
            self._groups[group] = number, itertools.count(1)
            ranks = dist.get_process_group_ranks(group)
            self.group(number, f"{group.group_name}:{library}", ranks, library)
        number, sequences = self._groups[group]
        output, given, record = tensors[0], tensors[-1], next(self._records)
        at = record % SLOTS * SLOT.size
        SLOT.pack_into(
            self._ring,
            at,
            record,
            number,
            0 if name == "exchange" else next(sequences),
            given.nbytes,
            output.nbytes,
            given.data_ptr(),
            output.data_ptr(),
            time.monotonic(),
            0.0,
            0.0,
            -1,
            0,
            _KINDS.get(name, name).encode(),
            str(given.dtype).encode()[6:],
        )

        def ended() -> None:
            if SLOT.unpack_from(self._ring, at)[0] == record:
                now_s = time.monotonic()
                STARTED.pack_into(self._ring, at + _STARTED_AT, now_s, now_s)

        return ended

    def close(self) -> None:
        """Removes the files: there was no fault."""
        with contextlib.suppress(ImportError):
            comm_core.record_flight("", None)
        with contextlib.suppress(OSError):
            self._facts.close()
        for path in self._paths.values():
            path.unlink(missing_ok=True)


_KINDS = {
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}


def start(rank: int, size: int) -> None:
    """Records in the folder of the environment variable, if it is set.

    A folder that cannot be written costs the record, not the training.
    """
    global _recorder
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _recorder = Recorder(Path(folder), rank, size)
    except (OSError, RuntimeError) as error:
        log.warning("no flight recorder: %s", error)


def current() -> Recorder | None:
    """Returns this rank's recorder, or None."""
    return _recorder


def note_bucket(params: Sequence[torch.nn.Parameter], *buffers: torch.Tensor | None) -> None:
    """Notes the memory of a bucket, if this rank records."""
    if _recorder is not None:
        _recorder.bucket(params, buffers)


def stop() -> None:
    """Ends the record and removes its files; call it when nothing failed."""
    global _recorder
    if _recorder is not None:
        _recorder.close()
        _recorder = None


def _new_ring(path: Path) -> mmap.mmap:
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, SLOTS * SLOT.size)
        return mmap.mmap(file.fileno(), SLOTS * SLOT.size)


def _common(names: Sequence[str]) -> str:
    """Returns the module that holds all parameters, or the first and the last name."""
    if len(set(names)) == 1:
        return names[0]
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    return ".".join(level[0] for level in shared) or f"{names[0]}..{names[-1]}"
