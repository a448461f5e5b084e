"""Strangers at the port of a job that trains: they change nothing, and leave nothing behind."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import random
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from common.launch.ranks import gather
from tests.comm import worlds
from tests.comm.operations import me
from tests.ranks import RankPool

MAGIC = 0x434D43524F4C4832
SECRET_BYTES = 32
WAIT_S = 60.0


@dataclass(frozen=True)
class Door:
    """Knowledge of somebody who has read the store: rank 0's address, a group's id and secret."""

    address: tuple[str, int]
    secret: bytes
    group: bytes

    def hello(self, kind: int = 1) -> bytes:
        nonce = random.randbytes(16)
        return struct.pack("<QiiB7x16s16s", MAGIC, 1, 0, kind, self.group, nonce)

    def proof(self, hello: bytes, challenge: bytes, side: bytes = b"c") -> bytes:
        return hmac.new(self.secret, side + hello + challenge, hashlib.sha256).digest()


def call(door: Door) -> socket.socket:
    caller = socket.create_connection(door.address, timeout=WAIT_S)
    # Closed at once: a port that waits for late packets is missing to the next stranger.
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return caller


def ended(caller: socket.socket) -> bool:
    """Returns whether the other side hangs up without another word."""
    try:
        return caller.recv(1) == b""
    except ConnectionError:
        return True


# Kinds of strangers. Each returns whether it was refused; None: it stays, and is closed later.


def garbage(door: Door, caller: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        caller.sendall(random.randbytes(random.randrange(56, 5000)))
    return ended(caller)


def brief(door: Door, caller: socket.socket) -> bool:
    caller.sendall(door.hello()[: random.randrange(1, 56)])
    return True


def silent(door: Door, caller: socket.socket) -> None:
    return None


def half_open(door: Door, caller: socket.socket) -> None:
    caller.sendall(door.hello()[: random.randrange(1, 56)])


def without_proof(door: Door, caller: socket.socket) -> None:
    caller.sendall(door.hello())


def slow(door: Door, caller: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        for byte in door.hello()[:20]:
            caller.sendall(bytes([byte]))
            time.sleep(0.001)


def of_another_group(door: Door, caller: socket.socket) -> bool:
    caller.sendall(struct.pack("<QiiB7x32s", MAGIC, 1, 0, 1, random.randbytes(32)))
    return ended(caller)


def of_no_rank(door: Door, caller: socket.socket) -> bool:
    ranks = random.choice([(0, 0), (2, 0), (-1, 0), (1, 1), (2**31 - 1, 0), (1, -(2**31))])
    kind = random.choice([0, 1, 2])
    caller.sendall(struct.pack("<QiiB7x16s16x", MAGIC, *ranks, kind, door.group))
    return ended(caller)


def of_no_kind(door: Door, caller: socket.socket) -> bool:
    caller.sendall(door.hello(kind=random.randrange(3, 256)))
    return ended(caller)


def answers_wrong(door: Door, caller: socket.socket, proof: bytes | None = None) -> bool:
    hello = door.hello()
    caller.sendall(hello)
    challenge = caller.recv(16, socket.MSG_WAITALL)
    if len(challenge) < 16:
        return True  # too many others came
    with contextlib.suppress(ConnectionError):
        caller.sendall(proof or hmac.new(b"x" * 32, hello + challenge, "sha256").digest())
    return ended(caller)


def replayed(door: Door, caller: socket.socket) -> bool:
    """Sends what a rank has sent that was admitted."""
    hello = door.hello()
    caller.sendall(hello)
    caller.recv(16, socket.MSG_WAITALL)
    with contextlib.suppress(ConnectionError):
        caller.sendall(door.proof(hello, b"an old challenge"))
    return ended(caller)


def reflected(door: Door, caller: socket.socket) -> bool:
    """Sends the acceptor's proof in place of the connector's."""
    hello = door.hello()
    caller.sendall(hello)
    challenge = caller.recv(16, socket.MSG_WAITALL)
    with contextlib.suppress(ConnectionError):
        caller.sendall(door.proof(hello, challenge, side=b"s"))
    return ended(caller)


STRANGERS = [garbage, brief, silent, half_open, without_proof, slow, of_another_group, of_no_rank]
STRANGERS += [of_no_kind, answers_wrong, replayed, reflected]
LEFT_OPEN = 300
"""Connections that stay at a time: more than a rank accepts."""


def come(door: Door, count: int) -> None:
    """Lets `count` strangers of all kinds come; raises if one was admitted."""
    waiting: list[socket.socket] = []
    for number in range(count):
        kind = STRANGERS[number % len(STRANGERS)]
        caller = call(door)
        refused: bool | None = True  # also who was dropped meanwhile, for a newer one
        with contextlib.suppress(ConnectionError):
            refused = kind(door, caller)
        assert refused is not False, f"{kind.__name__} was admitted"
        if refused:
            caller.close()
            continue
        waiting.append(caller)
        if len(waiting) > LEFT_OPEN:
            waiting.pop(random.randrange(LEFT_OPEN)).close()
    for caller in waiting:
        caller.close()


# The job --------------------------------------------------------------------------------------


def _gradient(weights: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 64, generator=generator)
    return inputs.T @ torch.tanh(inputs @ weights) / 16


_START = torch.eye(64)
_group: Any = None


def _joins() -> None:
    dist.all_reduce(torch.ones(1))


def _meets(go: Path) -> tuple[str, int]:
    """Makes the group that strangers will try, whose rank 1 comes late."""
    global _group
    rank, _ = me()
    while rank == 1 and not go.exists():
        time.sleep(0.01)
    _group = dist.new_group()
    dist.all_reduce(torch.ones(100_000), group=_group)
    summary = _group._get_backend(torch.device("cpu")).summary()
    host, _, port = summary.rpartition(" at ")[2].rpartition(":")
    return host, int(port)


def _facts() -> tuple[int, int]:
    process = psutil.Process()
    return process.num_fds(), process.memory_info().rss


def _trains(stop: Path) -> dict[str, Any]:
    """Trains until the file `stop` exists, with other operations and new groups in between."""
    rank, _ = me()
    weights, step = _START.clone(), 0
    before, running = (0, 0), torch.ones(1)
    while running.item() > 0:
        gradient = _gradient(weights, rank, step)
        dist.all_reduce(gradient, group=_group)
        weights -= 0.05 * gradient
        if rank == 0:
            dist.send(weights, 1, group=_group)
        else:
            dist.recv(other := torch.empty_like(weights), 0, group=_group)
            assert torch.equal(other, weights)
        if step % 50 == 0:
            group = dist.new_group()
            dist.all_reduce(each := torch.full((5000,), rank + 1.0), group=group)
            assert (each == 3).all()
            dist.destroy_process_group(group)
        step += 1
        if step == 200:  # what is allocated once has been
            before = _facts()
        running.fill_(float(step <= 200 or not stop.exists()))
        dist.broadcast(running, 0, group=_group)
    backend = _group._get_backend(torch.device("cpu"))
    until = time.monotonic() + WAIT_S
    while _facts()[0] > before[0] and time.monotonic() < until:
        time.sleep(0.05)  # the last strangers' ends are on their way
    alone = _START.clone()
    for past in range(step):
        alone -= 0.05 * (_gradient(alone, 0, past) + _gradient(alone, 1, past))
    return {
        "steps": step,
        "right": torch.equal(alone, weights),
        "descriptors": _facts()[0] - before[0],
        "grown": _facts()[1] - before[1],
        "dropped": backend.dropped_connections(),
    }


@contextlib.contextmanager
def _read(ranks: RankPool, folder: Path) -> Iterator[Door]:
    """Lets the ranks make a group, and yields what its notes in the store say."""
    go = folder / "go"
    ranks.run(_joins)  # the note of the ranks' first group is gone then
    for pipe in ranks.pipes.values():
        pipe.send((_meets, (go,)))
    until = time.monotonic() + WAIT_S
    while not (keys := [key for key in ranks._store.list_keys() if key.endswith("/secret")]):
        assert time.monotonic() < until, "rank 0 has left no secret"
        time.sleep(0.01)
    note = ranks._store.get(keys[0])
    go.touch()
    answers = dict(gather(ranks.pipes, WAIT_S))
    assert all(ok for ok, _ in answers.values()), answers
    yield Door(answers[0][1], note[:SECRET_BYTES], note[SECRET_BYTES:])


def _who_knows_the_secret_is_answered(door: Door) -> None:
    """Shows that refusals are not for everybody. The group has such a lane already."""
    with call(door) as caller:
        hello = door.hello()
        caller.sendall(hello)
        challenge = caller.recv(16, socket.MSG_WAITALL)
        caller.sendall(door.proof(hello, challenge))
        answer = caller.recv(32, socket.MSG_WAITALL)
        assert hmac.compare_digest(answer, door.proof(hello, challenge, side=b"s"))


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.full)])
def test_strangers_do_no_harm_to_a_job_that_trains(tmp_path: Path, count: int):
    random.seed(count)
    with worlds.pool("tcp2", timeout_s=300.0) as ranks, _read(ranks, tmp_path) as door:
        _who_knows_the_secret_is_answered(door)
        stop = tmp_path / "stop"
        for pipe in ranks.pipes.values():
            pipe.send((_trains, (stop,)))
        try:
            come(door, count)
        finally:
            stop.touch()
        answers = dict(gather(ranks.pipes, 300.0))
    noisy = count * (len(STRANGERS) - 1) // len(STRANGERS)  # who sends nothing may never be seen
    for rank, (ok, result) in sorted(answers.items()):
        assert ok, result
        assert result["right"] and result["steps"] > 200
        assert result["descriptors"] <= 0, f"rank {rank} keeps descriptors"
        assert result["grown"] < 16 << 20, f"rank {rank} has grown by {result['grown']} bytes"
    assert noisy <= answers[0][1]["dropped"] <= count + 1
    assert answers[1][1]["dropped"] == 0


# The address ----------------------------------------------------------------------------------


def _listens_at() -> list[str]:
    dist.all_reduce(torch.ones(4))
    sockets = psutil.Process().net_connections("inet")
    return [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]


def _interfaces() -> dict[str, str]:
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses[:1]
        if address.family == socket.AF_INET and psutil.net_if_stats()[name].isup
    }


@pytest.mark.parametrize("interface", sorted(_interfaces()))
def test_a_rank_listens_at_the_chosen_interface_only(interface: str):
    places = [{**place, "COMM_CORE_IFNAME": interface} for place in worlds.environments("tcp2")]
    ranks = RankPool(2, 30.0, "comm_core", places)
    try:
        assert ranks.run(_listens_at) == [[_interfaces()[interface]]] * 2
    finally:
        ranks.close()
