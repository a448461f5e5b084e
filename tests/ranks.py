"""A pool of rank processes that run test functions, so that a test costs no start of Python."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from common.launch.ranks import RankLost, Ranks, gather, rank_env
from common.machine.processes import preload_in_fork_server
from dear.training.algorithm import algorithm_names, load_plugin, plugin_of

# What many ranks import: the first optimizer takes dynamo, and dynamo FSDP; a test's own file takes
# pytest. What cannot be imported, such as a comm core that is not built, the server leaves out.
preload_in_fork_server(
    [
        *("torch", "torch.distributed", "torch._dynamo", "dear.optimizer", "comm_core"),
        *("dear.comm.communicator", "networkx", "pytest", "tests.contract.pairs"),
        *("tests.comm.bodies", "tests.comm.worlds"),
    ]
)


class RankError(AssertionError):
    """A test function failed on a rank; the message holds its traceback."""


class RankPool:
    """`world_size` processes in one job, each waiting for functions to run.

    `environments`: what each rank's environment has besides, in rank order. `pipes`, by rank, is
    for tests that do not want an answer of all.
    """

    def __init__(
        self,
        world_size: int,
        timeout_s: float = 30.0,
        backend: str = "gloo",
        environments: list[dict[str, str]] | None = None,
    ) -> None:
        # At a store in a file ranks look every 10 ms, which is what a group of theirs would cost.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        meeting["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this process serves it
        self._timeout_s = timeout_s
        self._ranks = Ranks()
        for rank in range(world_size):
            more = environments[rank] if environments else {}
            env = {**more, **meeting, **rank_env(rank, world_size)}
            self._ranks.function(_serve, backend, timeout_s, plugins(), env=env, piped=True)
        self.pipes = self._ranks.pipes
        self.broken = False

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `function(*args)` on every rank; returns the results in rank order.

        `function` must be importable by name. The first failing rank's traceback is raised.
        """
        for pipe in self.pipes.values():
            pipe.send_bytes(pickle.dumps((function, args)))
        results: dict[int, Any] = {}
        try:
            for rank, (ok, value) in gather(self.pipes, self._timeout_s * 2):
                if not ok:
                    raise RankError(f"rank {rank}:\n{value}")
                results[rank] = value
        except (RankError, RankLost) as error:
            self.close()
            raise RankError(str(error)) from None
        return [results[rank] for rank in sorted(results)]

    def reset(self) -> None:
        """Takes back what the last functions left in their processes, and finds ranks in step.

        Otherwise the pool is closed, and the error says that this test left it so.
        """
        self.run(_reset)

    def close(self) -> None:
        """Ends the ranks; for a pool that has been closed, too."""
        self.broken = True
        for pipe in self.pipes.values():
            pipe.close()
        self._ranks.stop(patience_s=5.0)


def plugins() -> list[Path]:
    """The files of algorithms that this process has besides dear's own."""
    known = map(plugin_of, algorithm_names())
    return [Path(plugin.path) for plugin in known if plugin is not None]


def on_ranks(size: int, kind: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test is what each of `size` ranks does, in `world(size, kind)`; it asserts there.

    Without `kind` the test's argument `name`, an algorithm, says which ranks it needs.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(world: Callable[..., RankPool], **given: Any) -> None:
            pool = world(size, kind or given.get("name", ""))
            pool.run(_body_of, body.__module__, body.__name__, given)

        plain = inspect.signature(body)
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = plain.replace(parameters=[world, *plain.parameters.values()])
        return test

    return decorate


def _body_of(module: str, name: str, given: dict[str, Any]) -> None:
    inspect.unwrap(getattr(importlib.import_module(module), name))(**given)


def _serve(pipe: Connection, backend: str, timeout_s: float, algorithms: list[Path]) -> int:
    import torch

    import dear

    torch.set_num_threads(1)
    for path in algorithms:
        load_plugin(path)
    if "comm_core" in backend:
        import comm_core  # noqa: F401 - makes the backend known
    dear.init(backend=backend, timeout_s=timeout_s)
    gc.freeze()  # so that a reset looks at what is new only
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            return 0
        try:
            result = (True, function(*args))
        except BaseException:
            result = (False, traceback.format_exc())
        # `pipe.send` would hand each tensor over as shared memory, in a connection of its own.
        pipe.send_bytes(pickle.dumps(result))
        del result  # or a reset would take for lasting what only this refers to


def _reset() -> None:
    import torch

    import dear

    gc.collect()  # optimizers that nobody closed let go of the model, and windows of their memory
    gc.freeze()  # what is left, modules and their caches, lasts: the next reset need not look at it
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if int(dear.allreduce(torch.ones(1), average=False).item()) != dear.size():
        raise AssertionError("a test left a collective that others have not made")
