"""Bodies of a soak's ranks: random collectives, and a training that is compared as it goes on.

The functions run in the processes of a `RankPool`; `Reference` is the same training in one process.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch.distributed as dist

import dear
from common.harness.worker.checking.serial import Ranks
from tests.comm.operations import COMPLEX, DTYPES, FLOATS, TORCH, UNEVEN, Call, Case, check
from tests.comm.operations import reductions as reductions_of
from tests.contract.algorithms import Meaning, algorithm_options, reference_of
from tests.contract.models import loss_of, make_model, make_optimizer
from tests.contract.training import OnRank, Script, state_of

LARGEST = 400_000
"""Elements of the largest block; with it, every way of the comm core is taken."""

State = dict[str, np.ndarray]


def drawn_case(draw: random.Random, size: int) -> Case:
    """Draws an operation; its blocks have 0 to `LARGEST` elements, small ones more often."""
    dtype = draw.choice(DTYPES)
    operation = draw.choice(list(TORCH))
    numel = int(LARGEST ** draw.random()) - 1
    if dtype in COMPLEX or dtype not in FLOATS:
        numel = min(numel, 50_000)  # the expected results of these take longest
    return Case(
        operation=operation,
        dtype=dtype,
        op=draw.choice(reductions_of(dtype)),
        numel=numel,
        gaps=" " not in operation and draw.random() < 0.2,
        root=draw.randrange(size),
        uneven=operation in UNEVEN and draw.random() < 0.3,
    )


def collectives(seed: int, count: int, pause_s: float) -> int:
    """Runs and checks `count` drawn operations, up to six at once; returns the bytes of results.

    Each rank waits before a start for a random time, whose mean is `pause_s`, and waits for the
    results in an order of its own.
    """
    draw, delay = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
    chosen = [drawn_case(draw, dist.get_world_size()) for _ in range(count)]

    def late(start: Callable[[Call], Any]) -> Callable[[Call], Any]:
        def started(call: Call) -> Any:
            time.sleep(delay.expovariate(1 / pause_s))
            return start(call)

        return started

    check({name: late(start) for name, start in TORCH.items()}, chosen, draw.randint(1, 6))
    return sum(case.numel * case.dtype.itemsize for case in chosen)


class _Longer(OnRank):
    """A training whose steps are asked for piece by piece."""

    steps = 0

    def advance(self, steps: int, delay: random.Random, pause_s: float) -> State:
        for _ in range(steps):
            time.sleep(delay.expovariate(1 / pause_s))
            self._in_turn(self.steps)
            self.steps += 1
        return state_of(self.model)

    def close(self) -> State:
        self._count()
        self.optimizer.close()
        return state_of(self.model)


_training: list[_Longer] = []
"""The training of this process, if one is under way."""


def begin(name: str, options: dict[str, Any], script: Script) -> None:
    _training[:] = [_Longer(name, options, script)]


def advance(steps: int, seed: int, pause_s: float) -> State:
    """Trains on; returns this rank's parameters and buffers."""
    return _training[0].advance(steps, random.Random(f"{seed} {dear.rank()}"), pause_s)


def end() -> State:
    return _training.pop().close()


class Reference:
    """The same training by the algorithm's serial reference, all ranks in this process."""

    def __init__(self, name: str, options: dict[str, Any], script: Script, size: int) -> None:
        self._model, self._in_turn = script.model, Meaning.of(name).in_turn
        self.models = [make_model(script.model) for _ in range(size)]
        self.optimizers = [make_optimizer(script.optimizer, model) for model in self.models]
        ranks = Ranks(self.models, self.optimizers)
        self._updates = reference_of(name, options)(ranks, algorithm_options(name, options))
        self._steps = 0

    def advance(self, steps: int) -> list[State]:
        """Trains on; returns the state of each rank's model."""
        for _ in range(steps):
            rates = [group["lr"] for group in self.optimizers[0].param_groups]
            for rank, optimizer in enumerate(self.optimizers):
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["lr"] *= not (self._in_turn and self._steps == 0)
                loss = loss_of(self._model, self.models[rank], rank, self._steps)
                assert loss is not None, "every rank has data"
                loss.backward()
            next(self._updates)
            for optimizer in self.optimizers:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
            self._steps += 1
        return [state_of(model) for model in self.models]

    def close(self) -> list[State]:
        self._updates.close()
        return [state_of(model) for model in self.models]


def far(got: list[State], wanted: list[State]) -> float:
    """Returns the largest difference of a tensor on a rank, relative to its norm."""
    return max(
        float(np.linalg.norm(mine[name] - value) / max(np.linalg.norm(value), 1e-3))
        for mine, theirs in zip(got, wanted, strict=True)
        for name, value in theirs.items()
    )


def used() -> dict[str, int]:
    """Returns what this process holds: resident bytes, descriptors and threads.

    The allocator first returns what is free, which depends on the sizes that were drawn last.
    """
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return {
        "rss_bytes": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
    }
