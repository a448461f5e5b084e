"""One rank of one engine: joins the job, then runs what the parent asks for, until it hangs up.

Started by `bench.team` as `python -m bench.rank`; never by hand.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import engines
from bench.sync import Hub
from common.emulation.namespaces import die_with_parent
from dear.errors import Unavailable


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a benchmark's function gets: this rank's engine and its neighbourhood."""

    rank: int
    size: int
    name: str
    engine: engines.Engine
    hub: Hub


def cpu_seconds() -> float:
    """CPU time of this process, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rank", type=int, default=None)
    args = parser.parse_args()
    die_with_parent()  # a stopped process obeys no other signal
    rank = engines.mpi_place() if args.rank is None else args.rank

    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(str(args.folder / f"{args.engine}.sock"))
    parent = Connection(line.detach())
    parent.send((rank, os.getpid()))
    try:
        import torch

        torch.set_num_threads(1)
        store = args.folder / f"{args.engine}.store"
        engine = engines.create(args.engine, rank, args.size, store)
        hub = Hub(args.folder, args.engine, rank, args.size)
    except Unavailable as reason:
        parent.send(("unavailable", str(reason)))
        parent.poll(None)  # mpirun would end the ranks that have not said so yet
        os._exit(0)
    except BaseException:
        parent.send(("failed", traceback.format_exc()))
        os._exit(1)
    parent.send(("ok", engine.versions))
    place = Place(rank=rank, size=args.size, name=args.engine, engine=engine, hub=hub)
    _serve(parent, place)
    engine.close()
    # Not by way of the interpreter's end, where threads of some engines make trouble.
    os._exit(0)


def _serve(parent: Connection, place: Place) -> None:
    while True:
        try:
            request = parent.recv()
        except (EOFError, ConnectionResetError):
            os._exit(1)
        if request is None:
            return
        module, name, arguments = request
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        try:
            parent.send(("ok", function(place, **arguments)))
        except BaseException:
            parent.send(("failed", traceback.format_exc()))


if __name__ == "__main__":
    main()
