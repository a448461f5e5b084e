"""Ranks find each other, a wrong roll is told to all who are there, and who is done waits."""

from __future__ import annotations

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from common.launch.ranks import Ranks, gather
from dear.comm import environment, rendezvous, runtime
from dear.comm.environment import RankFacts
from dear.comm.peers import Departures
from dear.comm.rendezvous import MeetingPoint, call_roll, meet, meeting_point
from dear.errors import UserError

HERE = re.escape(f"{socket.gethostname()} process {os.getpid()}")


def facts(rank: int, world_size: int, **given) -> RankFacts:
    given = {"launcher": "torchrun", "local_rank": 0, "local_world_size": 1} | given
    return RankFacts(rank=rank, world_size=world_size, **given)


def roll(ranks: list[int], world_size: int, timeout_s: float = 60.0) -> list[str | None]:
    """Returns what a roll call of these ranks answers each of them, None if all are there once."""
    store = dist.HashStore()

    def answer(rank: int) -> str | None:
        try:
            call_roll(store, facts(rank, world_size), timeout_s)
        except UserError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(answer, ranks))


def test_a_full_roll_passes_and_another_is_told_to_all():
    assert roll([2, 0, 1], 3) == [None, None, None]
    for message in roll([0, 1, 1], 3):
        assert re.search(f"rank 1 of 3 was started more than once: on {HERE} and {HERE}", message)
        assert "\n" not in message


def test_who_comes_to_a_job_that_is_complete_is_refused():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: call_roll(store, facts(rank, 2), 60.0), range(2)))
    for rank in range(2):
        with pytest.raises(UserError, match="give each its own MASTER_PORT"):
            call_roll(store, facts(rank, 2), 60.0)


def test_who_is_missing_is_told_with_those_that_came():
    for message in roll([0, 3], 4, timeout_s=1.0):
        assert message.startswith("rank 1, 2 of 4 did not come within 1 s")
        assert re.search(f"0 on {HERE}; 3 on {HERE}", message)
        assert "MASTER_ADDR" in message


def test_the_first_verdict_counts(monkeypatch):
    """The last rank may come just when another one has given up on it."""
    store = dist.HashStore()

    def comes_late(*_) -> str:
        call_roll(store, facts(1, 2), 60.0)
        return "rank 1 did not come"

    monkeypatch.setattr(rendezvous, "_missing", comes_late)
    call_roll(store, facts(0, 2), 0.1)  # both have joined


@pytest.fixture
def port(monkeypatch) -> int:
    """A free port of this machine, set as MASTER_PORT."""
    for name in ("DEAR_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    return number


@pytest.fixture
def same_join(monkeypatch):
    """Threads stand for processes here, whose counters of joins would agree."""
    monkeypatch.setattr(rendezvous, "_joins", iter(lambda: 0, None))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "[::1]"])
@pytest.mark.usefixtures("port", "same_join")
def test_ranks_meet_at_a_port_and_share_the_store(monkeypatch, address):
    monkeypatch.setenv("MASTER_ADDR", address)
    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(lambda rank: meet(facts(rank, 2), 60.0), range(2)))
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


@pytest.mark.usefixtures("same_join")
def test_ranks_meet_in_a_file_as_often_as_they_like(tmp_path, monkeypatch):
    monkeypatch.setenv("DEAR_STORE", str(tmp_path / "store"))
    for generation in range(2):
        monkeypatch.setattr(rendezvous, "_joins", iter(lambda number=generation: number, None))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: meet(facts(rank, 2), 60.0), range(2)))


def _as_rank_0(pipe: Connection, held_s: float) -> None:
    rendezvous.HELD_PORT_S = held_s
    try:
        meet(facts(0, 2), 60.0)
    except UserError as error:
        pipe.send(str(error))


def _answers_of_rank_0(port: int, processes: int, held_s: float) -> list[str]:
    """Returns the errors of processes that all want to be rank 0 at the port."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Ranks() as ranks:
        for _ in range(processes):
            ranks.function(_as_rank_0, held_s, env=place, piped=True)
        return [answer for _, answer in gather(ranks.pipes, 120.0)]


def test_a_port_that_nobody_or_a_stranger_holds_is_named(port):
    with pytest.raises(UserError, match=f"rank 1 of 2 did not reach rank 0 at 127.0.0.1:{port}"):
        meet(facts(1, 2), 0.2)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        (answer,) = _answers_of_rank_0(port, 1, held_s=1.0)
    assert f"rank 0 cannot open MASTER_PORT {port}: another program uses it" in answer


def test_a_second_rank_0_is_told_apart_from_a_stranger(port):
    for answer in _answers_of_rank_0(port, 2, held_s=60.0):
        assert re.search(r"rank 0 of 2 was started more than once: on .* and .*", answer)


class StoreOfAnEndingRank0:
    """Store of two processes, whose server ends when this one has read the verdict."""

    def __init__(self) -> None:
        self._ended = False

    def add(self, key: str, amount: int) -> int:
        self._check()
        self._ended = key == "heard"
        return {"rank0": 2, "rank1": 0, "heard": amount}[key]

    def set(self, key: str, value: str) -> None:
        self._check()

    def wait(self, keys: list[str], timeout: object) -> None:
        self._check()

    def _check(self) -> None:
        if self._ended:
            raise dist.DistNetworkError("the server has ended")


def test_rank_0_may_end_as_soon_as_all_have_read_the_verdict():
    rendezvous._let_the_others_read(StoreOfAnEndingRank0(), facts(0, 2))


def test_one_rank_needs_no_meeting_point(monkeypatch):
    """A rank that runs alone inside a launcher's job does not use that job's meeting point."""
    of_a_job = {"DEAR_STORE": "/the/store", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in of_a_job.items():
        monkeypatch.setenv(name, value)
    assert meeting_point(facts(0, 1)) == meeting_point(facts(0, 1), {}) == MeetingPoint()
    assert isinstance(meet(facts(0, 1), 1.0), dist.HashStore)


@pytest.mark.parametrize(
    ("launcher", "advice"),
    [
        ("Open MPI", "mpirun -x MASTER_ADDR="),
        ("MPICH", "mpiexec -genv MASTER_ADDR "),
        ("MVAPICH2", "mpirun_rsh ... MASTER_ADDR="),
        ("Flux", "flux run --env=MASTER_ADDR="),
        ("torchrun", "in the environment of every rank"),
    ],
)
def test_several_without_a_meeting_point_are_refused(launcher, advice):
    words = f"{launcher} started 2 ranks but gave them no meeting point.*{re.escape(advice)}"
    with pytest.raises(UserError, match=words):
        meeting_point(facts(0, 2, launcher=launcher), {})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "address", ["no-such-host.invalid", "localhost ", "me@localhost", "a" * 99]
)
@pytest.mark.usefixtures("port")
def test_a_master_that_is_no_address_is_named_at_once(monkeypatch, address, rank):
    monkeypatch.setenv("MASTER_ADDR", address)
    words = rf"^MASTER_ADDR='{address}' is no usable address: [^\n]*\Z"
    with pytest.raises(UserError, match=words):
        meet(facts(rank, 2), 60.0)


@pytest.fixture
def horovods_server(monkeypatch):
    """The server that horovodrun starts, in the environment of its ranks."""
    server = pytest.importorskip("horovod.runner.http.http_server").RendezvousServer()
    port = server.start()
    server.init([])
    for name in ("DEAR_STORE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    yield
    server.stop()


@pytest.mark.usefixtures("horovods_server", "same_join")
def test_ranks_of_horovodrun_meet_through_its_server():
    ranks = [facts(rank, 3, launcher="horovodrun") for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(lambda rank: meet(rank, 60.0), reversed(ranks)))
    stores[0].set("key", "value")
    assert stores[2].get("key") == b"value"


@pytest.mark.usefixtures("horovods_server")
def test_a_rank_0_that_horovodruns_server_does_not_know_is_named(monkeypatch):
    with pytest.raises(UserError, match=r"rank 0 did not announce its store in 0\.2 s"):
        meet(facts(1, 2, launcher="horovodrun"), 0.2)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    with pytest.raises(UserError, match=r"does not reach horovodrun's server at 127.0.0.1:1 \("):
        meet(facts(1, 2, launcher="horovodrun"), 0.2)


def test_open_mpis_session_folder_serves_one_host_only():
    env = {"PMIX_SERVER_TMPDIR": "/tmp/session"}
    one_host = facts(0, 2, launcher="Open MPI", local_world_size=2)
    assert meeting_point(one_host, env).path == "/tmp/session/dear-store"
    with pytest.raises(UserError, match="no meeting point"):
        meeting_point(facts(0, 2, launcher="Open MPI"), env)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[01-03,7],login1", "gpu01"),
        ("rack[0-1]n[2-3]-ib", "rack0n2-ib"),
    ],
)
def test_ranks_of_a_slurm_step_meet_at_its_first_host(nodes, first):
    env = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "5", "SLURM_STEP_NODELIST": nodes}
    points = {meeting_point(facts(rank, 2, launcher="Slurm"), env) for rank in range(2)}
    (point,) = points
    assert point.host == first and 1024 < point.port < 32768
    other = meeting_point(facts(0, 2, launcher="Slurm"), env | {"SLURM_STEP_ID": "6"})
    assert other.port != point.port
    # Steps of two jobs that were submitted together.
    ports = {
        meeting_point(
            facts(0, 2, launcher="Slurm"), env | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": str(step)}
        ).port
        for job, step in [("1234", 36), ("1235", 5), ("1236", 36), ("1237", 5)]
    }
    assert len(ports) == 4
    place = meeting_point(facts(0, 2, launcher="Slurm"), env | {"MASTER_PORT": "4000"})
    assert (place.host, place.port) == (first, 4000)
    one_host = facts(0, 2, launcher="Slurm", local_world_size=2)
    assert meeting_point(one_host, env).host == "127.0.0.1"


@pytest.mark.parametrize("port", ["four", "0", "65536", "-1", ""])
def test_a_wrong_port_is_named(port):
    with pytest.raises(UserError, match=f"MASTER_PORT='{port}'"):
        meeting_point(facts(0, 2), {"MASTER_ADDR": "h0", "MASTER_PORT": port})


# Places ---------------------------------------------------------------------------------------


def _counted(pipe: Connection, own_group: bool) -> None:
    if own_group:  # the script has made it
        dist.init_process_group("gloo", init_method="env://")
    runtime.init("gloo", 60.0)
    dist.barrier()  # a rank that ends earlier would break the connections that others still make
    pipe.send((runtime.rank(), runtime.local_rank(), runtime.local_size()))


@pytest.mark.parametrize("launcher", ["RANK WORLD_SIZE", "PMI_RANK PMI_SIZE", None])
def test_ranks_count_themselves_on_the_hosts_that_they_name(port, launcher):
    rank_name, size_name = (launcher or "RANK WORLD_SIZE").split()
    with Ranks() as ranks:
        for rank, host in enumerate(("h0", "h1", "h0")):
            env = {rank_name: str(rank), size_name: "3", "COMM_CORE_HOST_ID": host}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"GLOO_SOCKET_IFNAME": "lo"}
            ranks.function(_counted, launcher is None, env=env, piped=True)
        answers = sorted(answer for _, answer in gather(ranks.pipes, 120.0))
    assert answers == [(0, 0, 2), (1, 0, 1), (2, 1, 2)]


# Leaving --------------------------------------------------------------------------------------


def _leave() -> int:
    """Returns how often a rank looked around; rank 1 is not done before rank 0 has."""
    leaving, looks = Departures(runtime.communicator()), []
    store = dist.distributed_c10d._get_default_store()

    def look() -> None:
        looks.append(1)
        store.set("rank 0 has looked", "")

    if dist.get_rank() == 1:
        store.wait(["rank 0 has looked"])
    leaving.done()
    leaving.wait(30.0, look)
    return len(looks)


def test_a_rank_that_is_later_is_waited_for(world):
    looks, none = world(2).run(_leave)
    assert looks >= 1 and none == 0


def _never() -> str:
    leaving = Departures(runtime.communicator())
    if dist.get_rank() == 1:
        return ""
    leaving.done()
    with pytest.raises(RuntimeError) as caught:
        leaving.wait(0.7, lambda: None)
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(world):
    assert world(2).run(_never)[0] == "rank 0 is done, but after 0.7 s rank 1 is not"


def test_a_port_for_later_is_free_and_none_that_the_system_gives_to_others(tmp_path, monkeypatch):
    first, last = map(int, environment._TEMPORARY_PORTS.read_text().split())
    assert not any(first <= environment.free_port() <= last for _ in range(20))
    ports = tmp_path / "range"
    monkeypatch.setattr(environment, "_TEMPORARY_PORTS", ports)
    ports.write_text("1024\t65533\n")
    with socket.socket() as taken:
        taken.bind(("", 65534))
        assert {environment.free_port() for _ in range(8)} == {65535}
    ports.write_text("1024\t65535\n")
    assert environment.free_port() > 0
