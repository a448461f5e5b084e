"""A pool of rank processes that run test functions, so that a test costs no start of Python."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes that have the slow imports behind them; the first optimizer takes dynamo."""
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "dear.optimizer", "dear.comm.communicator"]
)


class RankError(AssertionError):
    """A test function failed on a rank; the message holds its traceback."""


class RankPool:
    """`world_size` processes in one job, each waiting for functions to run.

    `environments`: what each rank's environment has besides, in rank order.
    """

    def __init__(
        self,
        world_size: int,
        timeout_s: float = 30.0,
        backend: str = "gloo",
        environments: list[dict[str, str]] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._timeout_s = timeout_s
        self._pipes = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe()
            environment = {
                **(environments[rank] if environments else {}),
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "DEAR_STORE": f"{self._folder.name}/store",
            }
            args = (environment, backend, timeout_s, theirs)
            process = CONTEXT.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.broken = False

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `function(*args)` on every rank; returns the results in rank order.

        `function` must be importable by name. The first failing rank's traceback is raised.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            waiting = [p for i, p in enumerate(self._pipes) if i not in results]
            ready = wait(waiting, timeout=self._timeout_s * 2)
            if not ready:
                self.close()
                missing = [i for i in range(len(self._pipes)) if i not in results]
                raise RankError(f"no answer from ranks {missing} in {self._timeout_s * 2:.0f} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process died"
                if not ok:
                    self.close()
                    raise RankError(f"rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self._pipes))]

    def reset(self) -> None:
        """Takes back what the last functions left in their processes, and finds ranks in step.

        Otherwise the pool is closed, and the error says that this test left it so.
        """
        self.run(_reset)

    def close(self) -> None:
        self.broken = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(environment: dict[str, str], backend: str, timeout_s: float, pipe: Any) -> None:
    import torch

    import dear

    torch.set_num_threads(1)
    os.environ.update(environment)
    if "comm_core" in backend:
        import comm_core  # noqa: F401 - makes the backend known
    dear.init(backend=backend, timeout_s=timeout_s)
    gc.freeze()  # so that a reset looks at what is new only
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            result = (True, function(*args))
        except BaseException:
            result = (False, traceback.format_exc())
        pipe.send(result)


def _reset() -> None:
    import torch

    import dear

    gc.collect()  # optimizers that nobody closed let go of the model, and windows of their memory
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if int(dear.allreduce(torch.ones(1), average=False).item()) != dear.size():
        raise AssertionError("a test left a collective that others have not made")
