"""torch's generic tests of a backend (`DistributedTest._DistTestBase`), run on comm_core.

torch decides by the backend's name which of them apply. TORCH_SUITE_GATES says under which name
the decorators are evaluated: `comm_core` (what torch gives an unknown backend), or `gloo` or `mpi`
for the tests that torch opens for these alone. The backend that runs is comm_core in every case.
Four places where torch goes by gloo's name or words inside a test are bridged below, each with its
reason.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.testing._internal.common_distributed as common

import comm_core  # registers the backend, which the module below looks up by name
from comm_core import _core

NAME = comm_core.__name__
GATES = os.environ["TORCH_SUITE_GATES"]
WORLD_SIZE = int(os.environ["WORLD_SIZE"])

# What the tests expect an error to say, in gloo's words, and what comm_core says there.
WORDS = {" (Timed out|closed|timeout) ": "; timed out after "}


def _skip_if_small_worldsize(test: Any) -> Any:
    # torch asks for 8 ranks since it has 4-GPU machines; these tests need the ranks 0, 1 and 2.
    @wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if WORLD_SIZE < 3:
            sys.exit(common.TEST_SKIPS["small_worldsize"].exit_code)
        return test(*args, **kwargs)

    return wrapper


def _load() -> Any:
    # "cuda": CUDA tensors are staged through the host, so the tests that need GPUs apply too.
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common.DistTestCases.backend_feature[feature].add(NAME)
    if GATES != NAME:
        common.skip_if_small_worldsize = _skip_if_small_worldsize
    # Decorators look at the name while the module loads, everything else while a test runs.
    os.environ["BACKEND"] = GATES
    tests = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    os.environ["BACKEND"] = NAME
    tests.BACKEND = NAME
    # torch knows the backends with profiler events by name.
    tests.PROFILING_SUPPORTED_BACKENDS.append(NAME)
    tests.CUDA_PROFILING_SUPPORTED_BACKENDS.append(NAME)
    tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(NAME)
    return tests


tests = _load()
_monitored_barrier = tests.dist.monitored_barrier


def _monitored_barrier_of_any_backend(*args: Any, **kwargs: Any) -> None:
    # torch's function refuses every backend but gloo, by name, before it asks the backend.
    with mock.patch.object(tests.dist.distributed_c10d, "get_backend", return_value="gloo"):
        _monitored_barrier(*args, **kwargs)


tests.dist.monitored_barrier = _monitored_barrier_of_any_backend


class TorchSuite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        # The module has read it on import, for a single test of many: no file may serve twice.
        tests.INIT_METHOD = os.environ["INIT_METHOD"]
        # Forked, not spawned: importing torch in every rank of every test takes minutes in all.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(1)  # the ranks share few cores
        try:
            super()._run(*args, **kwargs)
        finally:
            _core.shut_down()  # a forked process leaves without atexit

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        test = getattr(self, test_name)
        if "accumulate_gradients_no_sync" in test_name:
            # These choose their CPU or CUDA variant by the name while they run.
            tests.BACKEND = GATES

        def with_reason() -> None:
            try:
                test()
            except unittest.SkipTest as skip:
                # torch's harness keeps the reason of a skip inside a rank to itself.
                print(f"skipped inside rank {self.rank}: {skip}", file=sys.stderr)
                raise

        setattr(self, test_name, with_reason)
        super().run_test(test_name, parent_pipe)

    def assertRaisesRegex(  # noqa: N802 (unittest's name)
        self, expected_exception: Any, expected_regex: Any, *args: Any, **kwargs: Any
    ) -> Any:
        words = WORDS.get(expected_regex, expected_regex)
        return super().assertRaisesRegex(expected_exception, words, *args, **kwargs)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        super()._check_return_codes(fn, elapsed_time)
        # torch looks at the first rank only; a crash of another one counts too.
        for rank, process in enumerate(self.processes):
            if process.exitcode is not None and process.exitcode < 0:
                raise RuntimeError(f"rank {rank} was ended by signal {-process.exitcode}")
