"""A rank that cannot join a group says why to the others, which need not wait for it."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import networkx as nx
import pytest
import torch
import torch.distributed as dist

from dear.comm import runtime
from dear.comm.peers import Peers
from tests.comm.operations import me
from tests.comm.worlds import pool
from tests.ranks import RankPool


def _joins(change: Callable[[int], None]) -> str:
    """Returns the error of a new group on which `change(rank)` has worked before."""
    import comm_core

    try:
        change(me()[0])
        dist.all_reduce(torch.ones(4), group=dist.new_group(backend="comm_core"))
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
        comm_core._core.shut_down()  # the next engine reads the environment anew
        for variable in ("COMM_CORE_IFNAME", "COMM_CORE_SECRET_FILE", "COMM_CORE_TRANSPORT"):
            os.environ.pop(variable, None)


class Sets:
    """Change of one rank's environment."""

    def __init__(self, wrong: int, variable: str, value: str) -> None:
        self.wrong, self.variable, self.value = wrong, variable, value

    def __call__(self, rank: int) -> None:
        if rank == self.wrong:
            os.environ[self.variable] = self.value


@pytest.mark.parametrize("wrong", [0, 1])
def test_who_cannot_join_says_why_to_the_others(wrong: int):
    ranks = RankPool(3)
    try:
        for variable, value, why in (
            ("COMM_CORE_IFNAME", "nope0", "no interface 'nope0'"),
            ("COMM_CORE_SECRET_FILE", "/no/such/file", "COMM_CORE_SECRET_FILE=/no/such/file"),
            ("COMM_CORE_TRANSPORT", "pigeon", "COMM_CORE_TRANSPORT=pigeon must be"),
        ):
            texts = ranks.run(_joins, Sets(wrong, variable, value))
            for rank, text in enumerate(texts):
                if rank == wrong:
                    assert text.startswith(f"ValueError: {why}"), text
                    continue
                assert text.startswith(f"DistBackendError: rank {wrong} (host "), text
                assert f") cannot join the group: {why}" in text and "\n" not in text, text
            assert ranks.run(_joins, Sets(-1, "", "")) == [""] * 3  # the next time all can
    finally:
        ranks.close()


def _around_one_who_does_not_come(folder: Path) -> str:
    """Rank 0 does not join before the others have given up; returns their error."""
    rank, n = me()
    if rank == 0:
        while not all((folder / str(other)).exists() for other in range(1, n)):
            time.sleep(0.01)
        return "not asked"
    communicator = runtime.communicator()
    communicator.timeout = timedelta(seconds=1)
    try:
        Peers(communicator, nx.DiGraph([(0, 1), (0, 2)]), apart=True)
    except RuntimeError as error:
        return str(error)
    finally:
        (folder / str(rank)).touch()
    return "no error"


def test_a_neighbour_who_does_not_join_in_time_is_named_with_its_host(tmp_path: Path):
    with pool("tcp3") as ranks:
        texts = ranks.run(_around_one_who_does_not_come, tmp_path)
    for rank in (1, 2):
        who = r"rank 0 \(host \S+, 127\.0\.0\.1:\d+\)"
        pattern = rf"{who} has not joined the group of ranks 0, {rank}: .*timeout"
        assert re.match(pattern, texts[rank]), texts


def _without_one(folder: Path, absent: int) -> str:
    """Makes a plain group of torch; `absent` does not join before the others have given up."""
    rank, n = me()
    if rank == absent:
        while len(list(folder.iterdir())) < n - 1:
            time.sleep(0.01)
        return "not asked"
    try:
        # The store's own limit is much longer than that of the group.
        dist.new_group(backend="comm_core", timeout=timedelta(seconds=5))
    except dist.DistError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        (folder / str(rank)).touch()
    return "no error"


@pytest.mark.parametrize("absent", [0, 2])
def test_the_ranks_of_a_plain_group_name_the_one_that_does_not_join(absent: int, tmp_path: Path):
    with pool("tcp3") as ranks:
        texts = ranks.run(_without_one, tmp_path, absent)
    for rank in {0, 1, 2} - {absent}:
        assert re.search(rf"group \S+: rank {absent} has not joined in time: ", texts[rank]), texts


def _with_few_descriptors(spare: int) -> str:
    """Rank 1 may open `spare` more descriptors while a group is made."""
    rank, _n = me()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))
    text = ""
    try:
        group = dist.new_group()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if not text:
        try:
            dist.barrier(group)
        except dist.DistBackendError as error:
            text = str(error)
        dist.destroy_process_group(group)
    dist.barrier()
    return text


@pytest.mark.parametrize("name", ["shm3", "tcp3", "hosts001"])
def test_a_rank_without_descriptors_keeps_nobody_waiting(name: str, tmp_path: Path):
    with pool(name) as ranks:
        failed = 0
        for spare in range(12):
            texts = ranks.run(_with_few_descriptors, spare)
            assert all(texts) or not any(texts), (spare, texts)
            failed += any(texts)
            for text in texts:
                assert "wait timeout" not in text and "timed out" not in text, (spare, text)
        assert failed > 0
