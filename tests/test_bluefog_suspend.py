"""bf.suspend and bf.resume: what queues up, what is refused, what goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import dear.bluefog as bf
from dear.errors import UserError
from tests.ranks import RankPool

T = bf.topology_util


def x(numel=3):
    return torch.full((numel,), float(bf.rank()))


def _queued():
    bf.set_topology(T.RingGraph(4))
    bf.set_machine_topology(T.RingGraph(2))
    under_way = bf.allreduce_nonblocking(x())
    bf.suspend()
    bf.suspend()
    in_place, copied = x(), x()
    handles = [
        bf.neighbor_allreduce_nonblocking(x()),
        bf.allreduce_nonblocking(x()),
        bf.allreduce_nonblocking_(in_place, average=False),
        bf.broadcast_nonblocking_(copied, 2),
        bf.allgather_nonblocking(x(1)),
        bf.neighbor_allgather_nonblocking(x(1)),
        bf.hierarchical_neighbor_allreduce_nonblocking(x()),
        bf.pair_gossip_nonblocking(x(), bf.rank() ^ 1),
    ]
    before = bf.synchronize(under_way)[0].item()
    time.sleep(0.05)
    polled = [bf.poll(handle) for handle in handles]
    untouched = torch.equal(in_place, x()) and torch.equal(copied, x())
    with pytest.raises(UserError, match=r"held back by bf\.suspend"):
        bf.wait(handles[0])
    bf.resume()
    bf.resume()
    values = [bf.wait(handle).tolist() for handle in handles]
    return before, any(polled), untouched, values, in_place[0].item(), copied[0].item()


def test_nonblocking_calls_queue_up_and_start_in_order(bluefog_pool):
    for rank, said in enumerate(bluefog_pool.run(_queued)):
        before, polled, untouched, values, in_place, copied = said
        assert (before, polled, untouched) == (1.5, False, True)
        around = [(rank - 1) % 4, (rank + 1) % 4]
        assert values[0] == pytest.approx([(rank + sum(around)) / 3] * 3)
        assert values[1] == [1.5] * 3
        assert (in_place, copied) == (6.0, 2.0)
        assert values[4] == [0, 1, 2, 3] and values[5] == sorted(around)
        assert values[6] == [1.5] * 3
        assert values[7] == [(rank + (rank ^ 1)) / 2] * 3


def _alone(flag: str):
    """Rank 0 is not suspended: its call ends only after the others have resumed."""
    if bf.rank() == 0:
        handle = bf.allreduce_nonblocking(x())
        time.sleep(0.2)
        ended = bf.poll(handle)
        Path(flag).touch()
        return ended, bf.wait(handle)[0].item()
    bf.suspend()
    handle = bf.allreduce_nonblocking(x())
    until = time.monotonic() + 20
    while not Path(flag).exists():
        assert time.monotonic() < until
        time.sleep(0.005)
    bf.resume()
    return False, bf.wait(handle)[0].item()


def test_a_suspended_rank_moves_nothing(bluefog_pool, tmp_path):
    assert bluefog_pool.run(_alone, str(tmp_path / "resume")) == [(False, 1.5)] * 4


def _refused():
    bf.set_topology(T.RingGraph(4))
    bf.win_create(x(), "w")
    bf.win_put(x() + 4, "w")
    bf.barrier()
    bf.suspend()
    calls = {
        "barrier": bf.barrier,
        "allreduce": lambda: bf.allreduce(x()),
        "allreduce_": lambda: bf.allreduce_(x()),
        "allgather": lambda: bf.allgather(x()),
        "broadcast": lambda: bf.broadcast(x(), 0),
        "broadcast_": lambda: bf.broadcast_(x(), 0),
        "broadcast_parameters": lambda: bf.broadcast_parameters({"x": x()}, 0),
        "allreduce_parameters": lambda: bf.allreduce_parameters({"x": x()}),
        "neighbor_allreduce": lambda: bf.neighbor_allreduce(x()),
        "neighbor_allgather": lambda: bf.neighbor_allgather(x()),
        "pair_gossip": lambda: bf.pair_gossip(x(), bf.rank() ^ 1),
        "InferSourceFromDestinationRanks": lambda: bf.InferSourceFromDestinationRanks([]),
        "set_topology": lambda: bf.set_topology(T.RingGraph(4)),
        "win_create": lambda: bf.win_create(x(), "v"),
        "win_put": lambda: bf.win_put(x(), "w"),
        "win_accumulate_nonblocking": lambda: bf.win_accumulate_nonblocking(x(), "w"),
        "win_get": lambda: bf.win_get("w"),
        "win_mutex": lambda: bf.win_mutex("w").__enter__(),
        "win_free": bf.win_free,
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except UserError as error:
            said[name] = str(error)
        else:
            said[name] = "went through"
    # What is this rank's own goes on.
    local = (
        bf.rank(),
        bf.win_update("w", clone=True)[0].item(),
        bf.load_topology().number_of_nodes(),
    )
    wrong = bf.pair_gossip_nonblocking(x(), bf.rank())
    right = bf.allreduce_nonblocking(x())
    bf.resume()
    with pytest.raises(UserError, match="is this rank itself"):
        bf.synchronize(wrong)
    after = bf.synchronize(right)[0].item(), bf.allreduce(x())[0].item()
    bf.win_free()
    return said, local, after


def test_what_needs_the_others_is_refused_in_one_line(bluefog_pool):
    for rank, (said, local, after) in enumerate(bluefog_pool.run(_refused)):
        wanted = {n: f"bf.{n} is held back by bf.suspend(): call bf.resume() first" for n in said}
        assert said == wanted
        put = (rank - 1) % 4 + 4 + (rank + 1) % 4 + 4
        assert local == (rank, pytest.approx((rank + put) / 3), 4)
        assert after == (1.5, 1.5)


def _shutdown():
    bf.suspend()
    handle = bf.allreduce_nonblocking(x())
    bf.shutdown()
    bf.init()
    with pytest.raises(UserError, match="no operation"):
        bf.synchronize(handle)
    return bf.allreduce(x())[0].item()


@pytest.mark.parametrize("world_size", [1, 2])
def test_shutdown_forgets_what_is_held_back(world_size):
    pool = RankPool(world_size, backend="comm_core")
    pool.run(bf.init)
    assert pool.run(_shutdown) == [(world_size - 1) / 2] * world_size
    pool.close()


def test_it_needs_init():
    with pytest.raises(UserError, match=r"bf\.init"):
        bf.suspend()
