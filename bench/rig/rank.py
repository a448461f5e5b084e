"""Process of a rank: joins the engine's job and runs the functions that the parent process sends.

`bench.rig.team` starts it as `python -m bench.rig.rank`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import struct
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.rig.engines import Engine, create
from common.emulation.hosts.namespaces import die_with_parent
from dear.errors import Unavailable
from dear.lazy import torch

_VALUE = struct.Struct("d")


class Place:
    """First argument of a benchmark's function: this rank's engine, and barriers. `name` is that of
    the engine."""

    def __init__(self, rank: int, size: int, name: str, engine: Engine, folder: Path) -> None:
        self.rank, self.size, self.name, self.engine = rank, size, name, engine
        self._paths = [str(folder / f"{name}.{i}.sync") for i in range(size)]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._paths[rank])

    def barrier(self, value: float = 0.0) -> float:
        """Waits for all ranks and returns the `value` of rank 0. The barrier uses Unix datagrams,
        not the engine, so that every engine starts from the same state. All ranks run on this
        machine, and sleep while they wait."""
        if self.rank == 0:
            for _ in range(self.size - 1):
                self._socket.recv(_VALUE.size)
            message = _VALUE.pack(value)
            for path in self._paths[1:]:
                self._socket.sendto(message, path)
            return value
        self._socket.sendto(_VALUE.pack(value), self._paths[0])
        return float(_VALUE.unpack(self._socket.recv(_VALUE.size))[0])

    def meet(self) -> None:
        """Waits until all ranks have called this, and all their operations have ended."""
        self.engine.fence()
        self.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rank", type=int, default=None, help="default: mpirun's")
    args = parser.parse_args()
    die_with_parent()  # a stopped process ignores every other signal
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"]) if args.rank is None else args.rank

    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(str(args.folder / f"{args.engine}.sock"))
    parent = Connection(line.detach())
    parent.send((rank, os.getpid()))
    try:
        torch.set_num_threads(1)
        store = args.folder / f"{args.engine}.store"
        engine = create(args.engine, rank, args.size, store)
        place = Place(rank, args.size, args.engine, engine, args.folder)
    except Unavailable as reason:
        parent.send(("unavailable", str(reason)))
        parent.poll(None)  # mpirun would end the ranks that have not answered yet
        os._exit(0)
    except BaseException:
        parent.send(("failed", traceback.format_exc()))
        os._exit(1)
    parent.send(("ok", engine.versions))
    _serve(parent, place)
    engine.close()
    os._exit(0)  # threads of some engines crash at the interpreter's usual end


def _serve(parent: Connection, place: Place) -> None:
    while True:
        try:
            request = parent.recv()
        except (EOFError, ConnectionResetError):
            os._exit(1)
        if request is None:
            return
        module, name, arguments = request
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
            parent.send(("ok", function(place, **arguments)))
        except BaseException:
            parent.send(("failed", traceback.format_exc()))


if __name__ == "__main__":
    main()
