"""What wire and memory allow, measured in the same run as the engines."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from bench.hosts import Host

_SOURCE = Path(__file__).with_name("memory_bound.cc")
_PORT = 5201


class LimitError(Exception):
    """The limit could not be measured; the message is one line."""


class MemoryBound:
    """Seconds that memory alone needs for a collective among ranks of this machine.

    Compiles a small program into `folder` on first use.
    """

    def __init__(self, folder: Path) -> None:
        self._program = folder / "memory_bound"

    def measure(self, world: int, nbytes: int, repeats: int = 9) -> dict[str, float]:
        """By operation; an all-reduce (or the pair of the two others) needs the sum of both."""
        if not self._program.exists():
            self._compile()
        threads = len(os.sched_getaffinity(0))
        arguments = [str(value) for value in (world, nbytes, repeats, threads)]
        bound: dict[str, float] = json.loads(_output([str(self._program), *arguments], 120))
        both = bound["reduce_scatter"] + bound["all_gather"]
        return bound | {"all_reduce": both, "rs_ag": both}

    def _compile(self) -> None:
        if shutil.which("g++") is None:
            raise LimitError("no g++ on the PATH")
        options = ["-O3", "-march=native", "-std=c++20", "-pthread"]
        _output(["g++", *options, str(_SOURCE), "-o", str(self._program)], 120)


def iperf_bytes_per_s(source: Host, target: Host, seconds: int = 2) -> float:
    """TCP payload rate of one connection, the first second left out."""
    if shutil.which("iperf3") is None:
        raise LimitError("no iperf3 on the PATH (apt-get install iperf3)")
    server = subprocess.Popen(
        target.command(["iperf3", "-s", "-1", "-B", target.address, "-p", str(_PORT)]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    client = ["iperf3", "-c", target.address, "-p", str(_PORT), "-J"]
    client += ["-t", str(seconds), "-O", "1"]
    try:
        deadline = time.monotonic() + 5
        while True:
            answer = json.loads(_output(source.command(client), seconds + 15, check=False))
            if "error" not in answer:
                return float(answer["end"]["sum_received"]["bits_per_second"]) / 8
            if time.monotonic() > deadline:
                raise LimitError(f"iperf3: {answer['error']}")
            time.sleep(0.1)  # the server does not listen yet
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(5)
        if server.poll() is None:
            server.kill()
            server.wait()


def _output(command: list[str], timeout_s: float, check: bool = True) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise LimitError(f"{Path(command[0]).name}: no end in {timeout_s:.0f} s") from error
    if done.returncode and check:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise LimitError(f"{Path(command[0]).name}: {said[-1] if said else done.returncode}")
    return done.stdout
