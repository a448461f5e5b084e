"""The backend that `dear.init()` takes where the script names none."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

import dear.comm.communicator
from dear.comm.communicator import default_backend
from dear.comm.environment import RankFacts
from dear.errors import Unavailable


def _facts(local_world_size: int, rank: int = 0) -> RankFacts:
    return RankFacts(
        launcher="torchrun",
        rank=rank,
        world_size=8,
        local_rank=0,
        local_world_size=local_world_size,
    )


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpus, core)`: a machine with that many GPUs, with the comm core built or not."""

    def make(gpus: int, core: bool = True) -> None:
        def prepare(backend: str) -> str:
            if not core:
                raise Unavailable("the comm core is not built")
            return backend

        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(dear.comm.communicator, "prepare", prepare)

    return make


@pytest.mark.parametrize(
    ("gpus", "local_world_size", "core", "wanted"),
    [
        (0, 1, True, "comm_core"),
        (0, 4, True, "comm_core"),
        (1, 1, True, "nccl"),
        (8, 4, True, "nccl"),
        (2, 2, False, "nccl"),
        (1, 2, True, "comm_core"),
        (4, 8, True, "comm_core"),
        (0, 2, False, "gloo"),
        (1, 2, False, "gloo"),
    ],
)
def test_nccl_where_every_rank_has_a_gpu_of_its_own_else_comm_core_or_gloo_and_rank_0_says_so(
    machine, caplog, gpus, local_world_size, core, wanted
):
    machine(gpus, core)
    with caplog.at_level(logging.WARNING, "dear"):
        assert default_backend(_facts(local_world_size, rank=1)) == wanted
        assert not caplog.records
        assert default_backend(_facts(local_world_size)) == wanted
    assert ("using gloo: the comm core is not built" in caplog.text) == (wanted == "gloo")


def test_a_missing_comm_core_names_the_command_that_builds_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "comm_core", None)
    with pytest.raises(Unavailable, match="make core"):
        dear.comm.communicator.prepare("comm_core")
