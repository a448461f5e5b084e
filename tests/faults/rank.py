"""Rank of a drawn job: it trains a small model, and does to itself what was drawn."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.harness.trial import Briefing, Trial
from common.harness.worker import rank as worker
from common.harness.worker.throughput import Phase
from common.harness.worker.training import Training
from dear.comm import runtime
from dear.comm.communicator import Communicator
from dear.training.pace import run_for
from tests.faults.drawing import COLLECTIVES, Fault

OWN_PACE_S = 4.0
"""Time for which ranks at their own pace train."""
ENDLESS_S = 600.0
AT = "fault-at"
"""File with the time of the fault (time.time_ns) and the victim's PID."""

DONE = "done"
"""File that says that what comes from outside the ranks has been done."""
WAITS_S = 20.0


class Drawn(Exception):  # noqa: N818  (a fault on purpose)
    """Exception of a rank that raises."""


@dataclass(frozen=True)
class Trained:
    """Result of a job that ends well."""

    steps: int
    lost_peers: list[int]
    """Ranks without which rank 0 went on."""


def main(folder: Path, repeat: int) -> int:
    """Runs a rank as the harness's worker does, with another body."""
    return worker.main(folder, repeat, body=_body)


def _body(trial: Trial, briefing: Briefing, repeat: int, phase: Phase) -> Trained:
    phase("joining the other ranks")
    worker.join(trial, briefing)
    communicator = runtime.communicator()
    victim = Victim(Fault.load(briefing.folder), briefing.folder, communicator)
    phase("building the model")
    step, statistics, close = _steps(trial, victim, communicator)
    communicator.barrier()
    phase("measuring")
    if trial.own_pace:
        endless = victim.fault.kind == "endless"
        steps = run_for(ENDLESS_S if endless else OWN_PACE_S, step, communicator).steps
    else:
        steps = 0
        while steps < victim.fault.steps or victim.fault.kind == "endless":
            steps += step()
        communicator.barrier()
    phase("leaving")
    close()
    # Only these counts can still be read, and only these ranks go on without others.
    lost = statistics()["lost"] if victim.fault.program == "asyncddp" else []
    return Trained(steps, lost)


def _steps(
    trial: Trial, victim: Victim, communicator: Communicator
) -> tuple[Callable[[], int], Callable[[], Mapping[str, Any]], Callable[[], None]]:
    """Functions that train a step, tell the algorithm's counts, and end the training."""
    if victim.fault.program == COLLECTIVES:
        calls = Calls(communicator, victim.fault)

        def call() -> int:
            victim.step()
            calls.step()
            return 1

        return call, dict, int
    workload = worker.make_workload(trial, torch.device("cpu"))
    first = next(module for module in workload.model.modules() if not list(module.children()))
    first.register_forward_hook(lambda *call: _within_backward(call[-1], victim))
    training = Training(trial, workload)
    engine = training.engine._engine  # its counts outlive the training

    def step() -> int:
        victim.step()
        training.step()
        return 1

    return step, engine.statistics, training.close


def _within_backward(output: torch.Tensor, victim: Victim) -> None:
    """The gradient of the first layer's output comes when most others have come."""
    if output.requires_grad:
        output.register_hook(lambda gradient: victim.backward())


class Calls:
    """Collectives of random kind and size, the same on all ranks."""

    def __init__(self, communicator: Communicator, fault: Fault) -> None:
        self._communicator = communicator
        self._random = random.Random(f"calls {fault.seed} {fault.index}")

    def step(self) -> None:
        """Calls some collectives at once, and waits for all."""
        works = []
        for _ in range(3):
            numel = self._communicator.size * self._random.choice((3, 1000, 20_000, 300_000))
            name = self._random.choice(("all_reduce", "all_gather", "reduce_scatter", "broadcast"))
            works.append(start(self._communicator, name, torch.ones(numel)))
        for work in works:
            work.wait()


def start(communicator: Communicator, name: str, tensor: torch.Tensor) -> object:
    """Starts a collective by its name."""
    part = tensor[: tensor.numel() // communicator.size].clone()
    if name == "all_gather":
        return communicator.all_gather(tensor, part)
    if name == "reduce_scatter":
        return communicator.reduce_scatter(part, tensor, op="sum")
    if name == "broadcast":
        return communicator.broadcast(tensor, root=0)
    return communicator.all_reduce(tensor, op="sum")


class Victim:
    """Does the fault of the drawn rank at its time; the other ranks only count their steps."""

    def __init__(self, fault: Fault, folder: Path, communicator: Communicator) -> None:
        self.fault, self._folder, self._communicator = fault, folder, communicator
        self._steps = -1
        self._due = False

    def step(self) -> None:
        """Called before each step."""
        self._steps += 1
        fate = self.fault.how.fate
        if fate == "disagrees" and self._steps == self.fault.step:
            self._disagree()
        if self._communicator.rank != self.fault.victim or self._steps != self.fault.step:
            return
        self._due = fate != "disagrees"
        if self.fault.moment == "before":
            self._act()
        elif self.fault.moment == "during":
            threading.Timer(self.fault.delay_ms / 1000, self._act).start()

    def backward(self) -> None:
        """Called within each backward pass."""
        if self.fault.moment == "backward":
            self._act()

    def _act(self) -> None:
        if not self._due:
            return
        self._due = False
        self._mark()
        act = _ACTS.get(self.fault.kind)
        if act is not None:
            act()
        elif self.fault.how.fate != "endless":  # somebody else acts, for which this rank waits
            until = time.monotonic() + WAITS_S
            while not (self._folder / DONE).exists() and time.monotonic() < until:
                time.sleep(0.005)

    def _mark(self) -> None:
        partial = self._folder / f"{AT}.partial"
        partial.write_text(f"{time.time_ns()} {os.getpid()}")
        partial.replace(self._folder / AT)

    def _disagree(self) -> None:
        """Two collectives of all ranks, of which the victim makes one in another way."""
        communicator = self._communicator
        calls = [("all_reduce", 1200, torch.float32), ("all_gather", 600, torch.float32)]
        if communicator.rank == self.fault.victim:
            self._mark()
            (name, numel, dtype), second = calls
            calls = {
                "another shape": [(name, 2 * numel, dtype), second],
                "another dtype": [(name, numel, torch.float64), second],
                "another operation": [("broadcast", numel, dtype), second],
                "another order": [second, (name, numel, dtype)],
            }[self.fault.kind]
        for name, numel, dtype in calls:
            start(communicator, name, torch.ones(numel * communicator.size, dtype=dtype)).wait()


def _fail() -> None:
    raise Drawn("the drawn fault")


def _exhaust() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + (64 << 20), resource.RLIM_INFINITY))
    held = []
    while True:
        held.append(torch.ones(1 << 22))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


_ACTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leaves": lambda: os._exit(0),
    "raises": _fail,
    "out of memory": _exhaust,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stopped 30 s": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "killed launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
