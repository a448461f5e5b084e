"""The launcher of nodes that were started by hand: all of them are processes of this machine."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.launch.job import make_launcher
from dear.errors import UserError
from tests.system.launch_stub import place, stub_job
from tests.system.processes import LIMIT_S, ROOT, alive, wait_for
from tests.system.test_launch_ssh import pids

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
def port() -> int:
    """First of a few ports that no program gets without asking for them by number."""
    return random.randrange(20000, 30000)


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
    server = socket.create_server(("127.0.0.1", 0))
    for hello, reason in (
        ("node 1 of 3", "node 0 has nnodes=2, this node 3"),
        ("node 1 of 2", "node_rank=1 is there already"),
        ("node 0 of 2", "node_rank=0 is there already"),
        ("GET / HTTP/1.1", ""),
    ):
        with socket.create_connection(server.getsockname()) as caller:
            caller.sendall(f"{hello}\n".encode())
            assert leader._admit(server.accept()[0], set()) is None
            assert caller.makefile().read().startswith(reason)
    leave(leader)
    assert node.wait(LIMIT_S) == 0
    server.close()


def test_a_node_that_has_ended_is_named_by_the_next_job(tmp_path, port, start, monkeypatch):
    node, leader = start(port, 1), launcher(port)
    leader.check()
    node.kill()
    node.wait(LIMIT_S)
    (tmp_path / "short.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from common.launch import nodes\n"
        "nodes.CALL_S = 0.2; sys.exit(nodes.main(sys.argv[1:]))"
    )
    short = [sys.executable, str(tmp_path / "short.py"), str(port), "node1"]
    monkeypatch.setattr(leader, "_agent_for", lambda host: None if host.name == "node0" else short)
    outcome = leader.run(stub_job(tmp_path / "job", "hang", world_size=2))
    assert "host node1 ended with status 255: node1 did not connect" in outcome.error["message"]
