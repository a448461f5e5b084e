"""The backend `comm_core`: every operation against torch, on every transport."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.comm import bodies
from tests.comm.values import DTYPES
from tests.comm.worlds import HOSTS, SHM, TCP, Job, World, pool

# One test for each of these: a whole family of operations in every size and type.
FAMILIES = [
    (bodies.all_reduce, DTYPES),
    (bodies.all_reduce_large,),
    (bodies.reduce_and_scatter,),
    (bodies.gather_everywhere, DTYPES),
    (bodies.uneven_lists,),
    (bodies.coalesced,),
    (bodies.rooted,),
    (bodies.all_to_all,),
    (bodies.non_contiguous,),
    (bodies.messages,),
    (bodies.messages_from_anybody,),
    (bodies.batches,),
    (bodies.barriers,),
    (bodies.many_in_flight,),
    (bodies.forgotten_tensors,),
    (bodies.futures,),
    (bodies.sub_groups,),
    (bodies.threads,),
    (bodies.objects,),
    (bodies.times_and_events,),
    (bodies.priorities,),
]


@pytest.fixture(scope="module", params=[*SHM, *TCP, *HOSTS])
def ranks(request):
    """A pool of ranks in each world in turn; a new one after a failure."""
    open_pools = []

    class Lazy:
        def run(self, *call):
            if not open_pools or open_pools[-1][1].broken:
                manager = pool(request.param)
                open_pools.append((manager, manager.__enter__()))
            return open_pools[-1][1].run(*call)

    yield Lazy()
    for manager, _ in open_pools:
        manager.__exit__(None, None, None)


@pytest.mark.parametrize("call", FAMILIES, ids=lambda call: call[0].__name__)
def test_operations(ranks, call):
    ranks.run(*call)


def test_the_world_ends_and_begins_again(ranks, tmp_path):
    ranks.run(bodies.again_after_destroy, str(tmp_path))


@pytest.mark.parametrize("name", ["shm8", "tcp8", "hosts00110011"])
def test_eight_ranks(name):
    with pool(name) as ranks:
        ranks.run(bodies.all_reduce, DTYPES[2:3])
        ranks.run(bodies.reduce_and_scatter)
        ranks.run(bodies.all_to_all)
        ranks.run(bodies.uneven_lists)


@pytest.mark.parametrize("name", ["shm2", "tcp3"])
def test_ddp_and_fsdp_train_as_over_gloo(name):
    with pool(name) as ranks:
        ranks.run(bodies.ddp_and_fsdp)


def test_an_idle_group_uses_no_processor():
    with pool("shm2") as first, pool("tcp2") as second, ThreadPoolExecutor() as threads:
        both = [threads.submit(p.run, bodies.idle_cpu_ms) for p in (first, second)]
        assert max(ms for future in both for ms in future.result()) < 5


@pytest.mark.parametrize("name", ["shm2", "tcp2"])
def test_an_operation_goes_on_while_python_is_busy(name):
    with pool(name) as ranks:
        ranks.run(bodies.progress_while_python_is_busy)


@pytest.mark.parametrize("how", ["tcpstore", "tcp", "env"])
def test_rendezvous(how):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = World("shm3").size
    with Job("shm3", bodies.meet, size, how, port, join=False) as job:
        assert [o.value for o in job.outcomes()] == [30.0] * 3
