"""The backend `comm_core` when ranks die, stop, leave or do not come."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm import bodies
from tests.comm.operations import me
from tests.comm.worlds import pool, run_without
from tests.contract.pairs import pairwise

CALLS: dict[str, Callable[..., object]] = {
    "all_reduce": dist.all_reduce,
    "reduce_scatter": lambda t, **how: dist.reduce_scatter_tensor(
        t[: t.numel() // dist.get_world_size()], t, **how
    ),
    "all_gather": lambda t, **how: dist.all_gather_into_tensor(
        t, t[: t.numel() // dist.get_world_size()].clone(), **how
    ),
    "broadcast": partial(dist.broadcast, src=0),
}
WORLDS = ["shm3", "tcp3", "hosts0011"]


def _lost_a_peer(text: str, victim: int, operation: str) -> None:
    """Peer, host, operation, sequence number and bytes are in it, and no time-out was needed."""
    assert re.match(rf"{operation} #\d+ \(float32, (\w+, )?\d+ bytes\) on rank \d", text), text
    assert re.search(rf"rank {victim} \(host \S+, 127.0.0.1:\d+\)", text), text
    assert "timed out" not in text and "\n" not in text, text


def _until_a_rank_ends(call: str, victim: int, how: str) -> str:
    """Calls until the victim has ended; returns the error."""
    import comm_core

    tensor = torch.zeros(3_000_000)
    try:
        for turn in itertools.count():
            if turn == 3 and me()[0] == victim:
                if how != "exits":  # in the middle of an operation
                    CALLS[call](tensor, async_op=True)
                if how == "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "shuts down":
                    comm_core._core.shut_down()
                os._exit(0)  # without a farewell
            CALLS[call](tensor)
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("no error")


ENDS = pairwise(
    {
        "name": WORLDS,
        "victim": ["first", "middle", "last"],
        "call": ["all_reduce", "reduce_scatter", "all_gather"],
        "how": ["is killed", "exits", "shuts down"],
    },
    lambda case: True,
)


@pytest.mark.parametrize(
    "end",
    [pytest.param(end, marks=[pytest.mark.full] if k > 3 else []) for k, end in enumerate(ENDS)],
    ids=lambda end: "-".join(end.values()).replace(" ", "_"),
)
def test_a_rank_that_ends_is_an_error_of_all_others_and_nothing_is_left(end: dict[str, str]):
    with pool(end["name"]) as ranks:
        pids = ranks.run(os.getpid)
        victim = {"first": 0, "middle": 1, "last": len(pids) - 1}[end["victim"]]
        for text in run_without(ranks, victim, _until_a_rank_ends, end["call"], victim, end["how"]):
            _lost_a_peer(text, victim, end["call"])
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _last_part(quick: bool) -> list[float]:
    """Rank 1 ends right after its part; rank 2, which passes it on to rank 0, is stopped then."""
    rank, _n = me()
    tensor = torch.full((70_000,), float(rank))
    if not quick and rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.broadcast(tensor, 1)
    if not quick and rank == 1:
        os._exit(0)
    return tensor.unique().tolist()


def _state(pid: int) -> str:
    path = Path(f"/proc/{pid}/stat")
    return path.read_text().rpartition(")")[2].split()[0] if path.exists() else "Z"


def _resumes_when_rank_1_has_ended() -> list[tuple[bool, object]]:
    with pool("tcp3") as ranks:
        pids = ranks.run(os.getpid)
        ranks.run(_last_part, True)  # opens the connections
        for pipe in ranks.pipes.values():
            pipe.send((_last_part, (False,)))
        while _state(pids[1]) != "Z" or _state(pids[2]) != "T":
            time.sleep(0.001)
        time.sleep(0.1)  # rank 0 knows of the end of rank 1
        os.kill(pids[2], signal.SIGCONT)
        return [ranks.pipes[rank].recv() for rank in (0, 2)]


def test_what_a_rank_sent_before_it_ended_still_arrives():
    # On a machine so busy that nothing progresses for 0.25 s, the end of rank 1 is an error.
    assert any(_resumes_when_rank_1_has_ended() == [(True, [1.0])] * 2 for _ in range(4))


def _ends_for_an_error_in_another_group() -> str | None:
    """Rank 2 disagrees with rank 0 in a group of the two, and ends at once; returns the error."""
    rank, _n = me()
    pair, text = dist.new_group([0, 2]), None
    dist.barrier()
    try:
        if rank == 1:
            dist.recv(torch.zeros(5), 2)
        else:
            dist.all_reduce(torch.zeros(rank + 1), group=pair)
    except dist.DistBackendError as error:
        text = str(error)
    if rank == 2:
        os._exit(1)
    return text


@pytest.mark.parametrize("name", ["shm3", "tcp3"])
def test_who_loses_a_rank_learns_for_which_error_of_another_group_it_has_ended(name: str):
    with pool(name) as ranks:
        for pipe in ranks.pipes.values():
            pipe.send((_ends_for_an_error_in_another_group, ()))
        for rank in (0, 1):
            right, text = ranks.pipes[rank].recv()
            assert right and "the ranks disagree: " in text, text
        pattern = r"recv #\d.* rank 2 .* reported: all_reduce #1 .*; lost rank 2 "
        assert re.search(pattern, text), text


def _stopped(operation: str) -> str:
    """Rank 1 stops in the middle of an operation, until rank 0 has its time-out."""
    rank, _n = me()
    call = CALLS[operation]
    group, pids = dist.new_group(timeout=timedelta(seconds=1)), [0] * me()[1]
    dist.all_gather_object(pids, os.getpid())
    tensor, text = torch.zeros(1_200_000), ""
    dist.barrier()
    try:
        if rank == 1:
            call(tensor, group=group, async_op=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            call(tensor, group=group)
    except dist.DistBackendError as error:
        text = str(error)
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    dist.destroy_process_group(group)
    bodies.unharmed()
    return text


def _leaves(leaver: int, how: str) -> str:
    """All but one go on; he destroys his group, or fails before."""
    group = dist.new_group()
    tensor, text = torch.zeros(100000), ""
    for _ in range(5):
        dist.all_reduce(tensor, group=group)
    dist.barrier()
    try:
        if me()[0] != leaver:
            while True:
                dist.all_reduce(tensor, group=group)
        if how == "disagrees":
            dist.all_reduce(tensor.int(), group=group)
    except dist.DistBackendError as error:
        text = str(error)
    dist.destroy_process_group(group)
    bodies.unharmed()
    return text


def _message_of_a_leaver(what: str) -> str:
    """Rank 1 leaves; the others wait for its message, or for it to take theirs."""
    rank, _n = me()
    group, text = dist.new_group(), ""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        time.sleep(0.1)
        dist.send(torch.full((5,), 7.0), 0, group)
        dist.destroy_process_group(group)
        store.set(f"left {what}", "")
    else:
        got = torch.zeros(5)
        if rank == 0:
            dist.recv(got, 1, group)  # what was sent before the end arrives
            assert got.sum() == 35
        if what.endswith("late"):
            store.wait([f"left {what}"])
        try:
            if what.startswith("recv"):
                dist.recv(got, 1, group)
            else:
                dist.send(torch.zeros(100000), 1, group)
        except dist.DistBackendError as error:
            text = str(error)
        dist.destroy_process_group(group)
    bodies.unharmed()
    return text


@pytest.mark.parametrize("name", WORLDS)
def test_a_rank_that_stops_or_leaves_its_group_is_named_and_the_world_goes_on(name: str):
    with pool(name) as ranks:
        for leaver, how in itertools.product((0, 1), ("destroys", "disagrees")):
            texts = ranks.run(_leaves, leaver, how)
            for text in texts[:leaver] + texts[leaver + 1 :]:
                _lost_a_peer(text, leaver, "all_reduce")
                assert how == "destroys" or "the ranks disagree" in text
        if name == "shm3":
            for what in ("recv", "recv late", "send", "send late"):
                texts = ranks.run(_message_of_a_leaver, what)
                for text in texts[:1] + texts[2:]:
                    assert re.match(rf"{what[:4]} #.* bytes\).*rank 1", text), text
        for operation in ("all_reduce", "reduce_scatter", "broadcast"):
            texts = ranks.run(_stopped, operation)
            others = texts[:1] + texts[2:]
            # A rank that waits for nobody's bytes is told by those that do.
            assert all("timed out after 1.0" in text for text in others), texts
            assert any(re.search(r"waiting for .*rank 1 \(host", text) for text in others), texts


def _late_barrier(wait_all: bool) -> str:
    """The last two ranks do not come before the others have given up."""
    rank, n = me()
    group, text = dist.new_group(), ""
    if rank < n - 2:
        try:
            group.monitored_barrier(timedelta(seconds=1), wait_all)
        except dist.DistBackendError as error:
            text = str(error)
    bodies.unharmed()
    dist.destroy_process_group(group)
    return text


@pytest.mark.parametrize("wait_all", [False, True])
def test_monitored_barrier_names_who_did_not_come(world, wait_all: bool):
    first, second, *_ = world(4).run(_late_barrier, wait_all)
    assert f"{'Ranks 2, 3' if wait_all else 'Rank 2'} failed to pass" in first
    assert "monitoredBarrier" in second
