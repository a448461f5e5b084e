"""The backend `comm_core` when ranks die, stop or leave, and when strangers come."""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.comm import faulty
from tests.comm.worlds import Job, shared_files

WORLDS = ["shm3", "tcp3", "hosts0011"]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = shared_files()
    yield
    left = shared_files() - before
    until = time.monotonic() + 5
    while left and time.monotonic() < until:  # those of other jobs on this machine go soon
        left &= shared_files()
        time.sleep(0.05)
    assert not left


def _lost_a_peer(text: str, victim: int, operation: str) -> None:
    """Peer, host, operation, sequence number and bytes are in it."""
    assert re.match(rf"{operation} #\d+ \(float32, (\w+, )?\d+ bytes\) on rank \d", text), text
    assert re.search(rf"rank {victim} \(host \S+, 127.0.0.1:\d+\)", text), text
    assert "\n" not in text


@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("victim", ["first", "middle", "last"])
@pytest.mark.parametrize("name", WORLDS)
def test_a_killed_rank_is_an_error_of_all_others(name, victim, call):
    if call != "all_reduce" and victim != "middle":
        return  # the rest of the product adds nothing but time
    with Job(name, faulty.loop, call, 3_000_000, timeout_s=30) as job:
        killed = {"first": 0, "middle": 1, "last": job.size - 1}[victim]
        job.hear()
        time.sleep(0.05)
        job.signal(signal.SIGKILL, killed)
        at = time.monotonic()
        others = [r for r in range(job.size) if r != killed]
        for outcome in job.outcomes(others):
            assert outcome.kind == "DistBackendError", outcome
            assert outcome.at - at < 3
            _lost_a_peer(outcome.value, killed, call)


@pytest.mark.parametrize("name", WORLDS)
def test_a_stopped_rank_is_a_timeout_that_names_it(name):
    with Job(name, faulty.loop, "all_reduce", 1_000_000, timeout_s=2) as job:
        job.hear()
        job.signal(signal.SIGSTOP, 1)
        others = [r for r in range(job.size) if r != 1]
        texts = []
        for outcome in job.outcomes(others):
            assert outcome.kind == "DistBackendError", outcome
            texts.append(outcome.value)
            assert "timed out after 2.0" in outcome.value
        assert any(re.search(r"waiting for .*rank 1 \(host", text) for text in texts), texts


@pytest.mark.parametrize("how", ["destroys", "returns", "disagrees"])
@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("name", WORLDS)
def test_a_rank_that_leaves_while_others_wait(name, leaver, how):
    with Job(name, faulty.loop_or_leave, leaver, how) as job:
        others = [r for r in range(job.size) if r != leaver]
        job.outcome(leaver)
        if how == "returns":  # its process ends without a farewell
            job.end(leaver)
        at = time.monotonic()
        for outcome in job.outcomes(others):
            assert outcome.kind == "DistBackendError", outcome
            assert outcome.at - at < 3
            _lost_a_peer(outcome.value, leaver, "all_reduce")
            if how == "disagrees":
                assert "the ranks disagree" in outcome.value


@pytest.mark.parametrize("what", ["recv", "recv late", "send", "send late"])
def test_messages_with_a_rank_that_left(what):
    with Job("shm3", faulty.receive_from_leaver, what) as job:
        assert job.outcome(1).kind == "returned"
        at = time.monotonic()
        for outcome in job.outcomes([0, 2]):
            assert outcome.kind == "DistBackendError", outcome
            assert outcome.at - at < 3
            assert re.match(rf"{what[:4]} #.* bytes\).*rank 1", outcome.value)


@pytest.mark.parametrize("wait_all", [False, True])
def test_monitored_barrier_names_who_did_not_come(wait_all):
    with Job("shm4", faulty.late_barrier, wait_all, timeout_s=20) as job:
        job.hear()
        first = job.outcome(0)
        assert first.kind == "DistBackendError"
        assert f"{'Ranks 2, 3' if wait_all else 'Rank 2'} failed to pass" in first.value
        second = job.outcome(1)
        assert second.kind == "DistBackendError" and "monitoredBarrier" in second.value, second


def test_the_engine_ends_in_the_middle_of_an_operation():
    with Job("shm2", faulty.exits_at_once) as job:
        job.outcome(1)
        job.end(1)
        assert job.outcome(0).kind == "DistBackendError"


def _port(summary: str) -> tuple[str, int]:
    found = re.search(r" at (\S+):(\d+)$", summary)
    assert found, summary
    return found[1], int(found[2])


def _strangers(address: tuple[str, int]) -> list[socket.socket]:
    """Garbage of several kinds, and 100 that say nothing. Returns those that stay."""
    for garbage in (b"x", b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(4096), b"\xff" * 4096):
        with socket.create_connection(address) as stranger:
            stranger.sendall(garbage)
    return [socket.create_connection(address) for _ in range(100)]


@pytest.mark.parametrize("name", ["hosts001"])
def test_strangers_harm_nothing_and_are_counted(name):
    with Job(name, faulty.serve_while_strangers_come, 6.0, timeout_s=20) as job:
        address = _port(job.hear()[0])
        strangers = _strangers(address)
        outcomes = job.outcomes()
        for stranger in strangers:
            stranger.close()
        for rank, outcome in enumerate(outcomes):
            assert outcome.kind == "returned", outcome
            dropped, longest, _cpu = outcome.value
            assert dropped == (104 if rank == 0 else 0)
            assert longest < 1


def test_strangers_do_not_wake_an_idle_engine_for_long():
    with Job("tcp2", faulty.wait_idle, 2.0) as job:
        strangers = _strangers(_port(job.hear()[0]))
        for outcome in job.outcomes():
            assert outcome.kind == "returned" and outcome.value < 0.05, outcome
        for stranger in strangers:
            stranger.close()


def test_no_process_and_no_thread_is_left():
    with Job("hosts0011", faulty.loop, "barrier", 1) as job:
        job.hear()
        pids = [job.pid(rank) for rank in range(job.size)]
        job.signal(signal.SIGKILL, 2)
        job.outcomes([0, 1, 3])
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
