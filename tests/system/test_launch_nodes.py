"""The launcher of nodes that were started by hand: all of them are processes of this machine."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.launch import nodes
from common.launch.hosts import Host
from common.launch.job import make_launcher
from common.paths import LOGS
from dear.errors import UserError
from tests.system.launch_stub import place, stub_job
from tests.system.processes import LIMIT_S, ROOT, alive, wait_for
from tests.system.test_launch_ssh import pids

SECRET = b"s" * 32
NODE = """
import sys
from pathlib import Path
from tests.system.launch_stub import StubJob
from tests.system.test_launch_nodes import launcher
rank, nnodes, port, folder = sys.argv[1:]
node = launcher(int(port), int(nnodes), int(rank))
if rank == "0":
    node.check()
    node.run(StubJob(folder=Path(folder), repeat=0, world_size=2, timeout_s=200))
else:
    sys.exit(node.follow())
"""


def launcher(port: int, nnodes: int = 2, node_rank: int = 0, wait_s: float = 100.0):
    options = {"nnodes": nnodes, "node_rank": node_rank, "control_port": port, "wait_s": wait_s}
    return make_launcher("nodes", hosts=None, world_size=4, options=options)


@pytest.fixture
def port() -> Iterator[int]:
    """First of a few ports that no program gets without asking for them by number."""
    number = random.randrange(20000, 30000)
    yield number
    # A killed node 0 leaves its secret, which the next one replaces.
    (LOGS / f".nodes-127.0.0.1-{number}").unlink(missing_ok=True)


def connected() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


@pytest.fixture
def start():
    """Starts a node as a program, and ends it with the test."""
    started = []

    def node(port: int, rank: int, nnodes: int = 2, folder: Path | str = "") -> subprocess.Popen:
        words = [sys.executable, "-c", NODE, *map(str, (rank, nnodes, port, folder))]
        started.append(subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield node
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def leave(leader) -> None:
    """Lets node 0 end, as far as the others see."""
    for link in leader._links.values():
        link.close()


def test_every_node_starts_its_ranks_until_the_first_one_ends(tmp_path, port, start):
    node, leader = start(port, 1), launcher(port)
    leader.check()
    for name, world, ranks in (
        ("all", 4, [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]),
        ("one", 1, [[0, 1, 0, 1]]),
        ("odd", 3, [[0, 3, 0, 2], [1, 3, 1, 2], [2, 3, 0, 1]]),
    ):
        job = stub_job(tmp_path / name, "ok", world_size=world)
        outcome = leader.run(job)
        assert outcome.status == "ok", outcome.error
        assert [place(job.folder, rank)["ranks"] for rank in range(world)] == ranks
    leave(leader)
    assert node.wait(LIMIT_S) == 0


def test_a_killed_rank_is_named_and_the_others_end(tmp_path, port, start):
    start(port, 1)
    leader = launcher(port)
    leader.check()
    job = stub_job(tmp_path / "job", "kill", world_size=2)
    outcome = leader.run(job)
    assert outcome.error["message"] == "rank 1 was killed by signal 9"
    assert not any(map(alive, pids(job)))


@pytest.mark.parametrize("killed", [0, 1])
def test_ranks_end_with_each_of_the_nodes(tmp_path, port, start, killed):
    job = stub_job(tmp_path / "job", "hang", world_size=2)
    nodes = [start(port, rank, folder=job.folder) for rank in range(2)]
    ranks = pids(job)
    nodes[killed].kill()
    wait_for(lambda: not any(map(alive, ranks)))
    assert nodes[1 - killed].wait(LIMIT_S) == 0


def test_nodes_that_do_not_belong_together_are_told(port, start):
    with pytest.raises(UserError, match=r"node 1, 2 of 3 did not connect in 0\.2 s"):
        launcher(port, nnodes=3, wait_s=0.2).check()
    with pytest.raises(UserError, match=f"node 0 does not answer at 127.0.0.1, port {port}: "):
        launcher(port, node_rank=1, wait_s=0.1).follow()
    node, leader = start(port, 1), launcher(port)
    leader.check()
    for hello, reason in (
        ("node 1 of 3", "node 0 has nnodes=2, this node 3"),
        ("node 1 of 2", "node_rank=1 is there already"),
        ("node 0 of 2", "node_rank=0 is there already"),
    ):
        ours, theirs = connected()
        with ThreadPoolExecutor(1) as pool, ours:
            admitted = pool.submit(leader._admit, theirs, SECRET, set())
            assert nodes.greet(ours, SECRET, hello)
            assert ours.makefile().read().startswith(reason)
            assert admitted.result() is None
    leave(leader)
    assert node.wait(LIMIT_S) == 0


def _in_turn(*lines: str) -> Callable[[socket.socket], None]:
    def talk(link: socket.socket) -> None:
        for line in lines:
            link.sendall(line.encode())
            link.recv(4096)

    return talk


def _with_another_secret(link: socket.socket) -> None:
    nodes.greet(link, b"x" * 32, "node 1 of 2")


def _with_an_old_proof(link: socket.socket) -> None:
    """Repeats what a node has sent to prove itself in an earlier connection."""
    link.sendall(f"node 1 of 2 {'ab' * 16}\n".encode())
    link.recv(4096)
    old = nodes._proof(SECRET, "node", "node 1 of 2", "ab" * 16, "cd" * 16)
    link.sendall(f"{old}\n".encode())


STRANGERS = {
    "leaves": lambda link: None,
    "web": _in_turn("GET / HTTP/1.1\r\n\r\n"),
    "node without secret": _in_turn("node 1 of 2\n"),
    "no proof": _in_turn(f"node 1 of 2 {'0' * 32}\n", "0" * 64 + "\n"),
    "bytes that are no text": lambda link: link.sendall(bytes(range(256)) * 40 + b"\n"),
    "no end": lambda link: link.sendall(b"x" * (1 << 16)),
    "another secret": _with_another_secret,
    "old proof": _with_an_old_proof,
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_not_taken_for_a_node(port, stranger):
    leader = launcher(port)
    ours, theirs = connected()
    with ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(leader._admit, theirs, SECRET, {1})
        with ours, contextlib.suppress(OSError):
            STRANGERS[stranger](ours)
            ours.shutdown(socket.SHUT_WR)
        assert admitted.result() is None


def test_a_slow_stranger_is_sent_away(port, monkeypatch):
    monkeypatch.setattr(nodes, "GREETING_S", 0.2)
    ours, theirs = connected()
    with ThreadPoolExecutor(1) as pool, ours:
        admitted = pool.submit(launcher(port)._admit, theirs, SECRET, {1})
        with contextlib.suppress(OSError):
            while not admitted.done():
                ours.sendall(b"n")
                time.sleep(0.01)
        assert admitted.result() is None


@pytest.mark.parametrize("mode", [0o600, 0o644], ids=["nobody reads it", "others read it"])
def test_a_stranger_in_node_0s_place_runs_nothing(tmp_path, port, monkeypatch, mode):
    """The stranger knows every word of the protocol, but not the secret."""
    monkeypatch.setattr(nodes, "LOGS", tmp_path)
    secret = tmp_path / f".nodes-127.0.0.1-{port}"
    secret.write_bytes(SECRET)
    secret.chmod(mode)
    mark, answers = tmp_path / "mark", []

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                link = server.accept()[0]
                with link, contextlib.suppress(OSError):
                    hello = nodes._line(link).split()
                    challenge = "ab" * 16
                    proof = nodes._proof(b"y" * 32, "lead", *hello, challenge)
                    link.sendall(f"{challenge} {proof}\ntouch {mark}\n".encode())
                    answers.append(link.makefile().read())

    servers = [socket.create_server(("127.0.0.1", port + k)) for k in range(2)]
    threads = [threading.Thread(target=serve, args=(server,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    words = "does not know the secret" if mode == 0o600 else "nobody else may read it"
    with pytest.raises(UserError, match=words):
        launcher(port, node_rank=1, wait_s=0.3).follow()
    link = launcher(port)._call(port + 1, 0.0)
    with link:
        assert not nodes.greet(link, SECRET, "node1")
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
    assert not mark.exists() and not any(answers)


def test_the_secret_is_new_each_time_and_for_the_user_only(tmp_path, monkeypatch, port):
    monkeypatch.setattr(nodes, "LOGS", tmp_path)
    seen = set()
    for _ in range(2):
        leader = launcher(port, wait_s=0.01)
        with pytest.raises(UserError, match="did not connect"):
            leader.check()
        (path,) = tmp_path.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        seen.add(path.read_bytes())
        assert not any(path.read_bytes().hex() in word for word in leader._agent_for(node1()))
        del leader
        gc.collect()
        assert not list(tmp_path.iterdir())
    assert len(seen) == 2 and all(len(secret) == 32 for secret in seen)


def node1() -> Host:
    return Host(name="node1", slots=1)


@pytest.mark.parametrize(
    ("master", "everywhere"), [("127.0.0.1", False), ("localhost", False), ("node0", True)]
)
def test_nodes_of_one_machine_listen_on_its_loopback_only(port, master, everywhere):
    with nodes._listen(master, port) as server:
        assert (server.getsockname()[0] != "127.0.0.1") == everywhere


def test_a_node_that_has_ended_is_named_by_the_next_job(tmp_path, port, start, monkeypatch):
    node, leader = start(port, 1), launcher(port)
    leader.check()
    node.kill()
    node.wait(LIMIT_S)
    (tmp_path / "short.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from common.launch import nodes\n"
        "nodes.CALL_S = 0.2; sys.exit(nodes.main(sys.argv[1:]))"
    )
    short = [sys.executable, str(tmp_path / "short.py"), *leader._agent_for(node1())[3:]]
    monkeypatch.setattr(leader, "_agent_for", lambda host: None if host.name == "node0" else short)
    outcome = leader.run(stub_job(tmp_path / "job", "hang", world_size=2))
    assert "host node1 ended with status 255: node1 did not connect" in outcome.error["message"]
