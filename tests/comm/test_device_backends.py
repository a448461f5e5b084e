"""Jobs whose CPU and CUDA tensors have different backends, and backends that the GPU's stream ends.

They run without a GPU: the CPU's part is real, and what NCCL would do is put in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dear
from dear import dadt
from dear.comm import communicator as communicators
from dear.comm import runtime
from dear.comm.handles import Exchange
from dear.dadt.session import current
from dear.errors import UserError
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks on a machine with a GPU each, as far as CPU tensors show."""
    pool = RankPool(2, 60.0, "cpu:comm_core,cuda:gloo")
    yield pool
    pool.close()


def _cpu_part() -> list[Any]:
    c = runtime.communicator()
    device = torch.device("cpu")
    c.record_times = True
    work = c.all_reduce(torch.ones(1000), op="sum", priority=1)
    work.wait()
    regimes = [name for name, _ in c.regimes("all_reduce", device) or ()]
    with pytest.raises(UserError, match="has no priorities"):
        c._queue(0, 1, SimpleNamespace(device=torch.device("cuda")))
    shared = c.allocate(torch.empty(0), 8)
    c.record_times = False
    return [c.backend, work.times().finished_s > 0, bool(regimes), shared.tolist()]


def test_cpu_tensors_have_all_of_comm_core_beside_another_backend_for_cuda(pair):
    config = "cpu:comm_core,cuda:gloo"
    assert pair.run(_cpu_part) == [[config, True, True, [0.0] * 8]] * 2


def _bytescheduler(options: dict[str, Any], streamed: bool) -> Any:
    c = runtime.communicator()
    if streamed:
        c.native, c.streamed = frozenset(), frozenset({"cpu"})
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    dear.broadcast_parameters(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        dear.DistributedOptimizer(optimizer, model, algorithm="bytescheduler", **options)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 64) * (c.rank + 1)).sum().backward()
            optimizer.step()
        optimizer.synchronize()
        findings = optimizer._engine.findings()
        optimizer.close()
        return findings["queues"], findings["credit_mb"], model[0].weight.sum().item()
    except UserError as error:
        return str(error)
    finally:
        c.native, c.streamed = frozenset({"cpu"}), frozenset()


def test_bytescheduler_promises_a_credit_only_where_it_returns(pair):
    """NCCL's futures complete when a collective is queued: a credit would return at once."""
    ordinary = pair.run(_bytescheduler, {}, False)
    streamed = pair.run(_bytescheduler, {}, True)
    assert {result[:2] for result in ordinary} == {(4, None)}
    assert {result[:2] for result in streamed} == {(1, None)}
    refused = pair.run(_bytescheduler, {"credit_mb": 2.0}, True)
    assert all("credit_mb=2: NCCL does not report when" in message for message in refused)


def _on_complete() -> str:
    c = runtime.communicator()
    c.native, c.streamed = frozenset(), frozenset({"cpu"})
    try:
        work = c.all_reduce(torch.ones(1), op="sum")
        work.wait()
        with pytest.raises(UserError) as refusal:
            work.on_complete(lambda: None)
        return str(refusal.value)
    finally:
        c.native, c.streamed = frozenset({"cpu"}), frozenset()


def test_a_work_of_nccl_calls_nobody_back(pair):
    assert all("NCCL does not tell" in message for message in pair.run(_on_complete))


def _staged() -> list[float]:
    c = runtime.communicator()
    send, recv = torch.full((5,), float(c.rank)), torch.full((5,), -1.0)
    exchange = Exchange(send, recv, 1 - c.rank, c.groups[0], staged=True)
    before = recv[0].item()
    exchange.wait()
    exchange.wait()
    return [before, *recv.tolist()]


def test_a_staged_exchange_is_there_after_wait(pair):
    assert pair.run(_staged) == [[-1.0] + [1.0] * 5, [-1.0] + [0.0] * 5]


def _staged_messages() -> list[float]:
    from comm_core.streams import collectives

    c = runtime.communicator()
    recv, peer = torch.full((3,), -1.0), 1 - c.rank
    messages = [(peer, torch.full((3,), float(c.rank)))]
    for work in collectives._staged(c.groups[0], [(peer, recv)], messages):
        work.wait()
    return recv.tolist()


def test_staged_messages_of_the_multi_stream_communicator_are_there_after_wait(pair):
    assert pair.run(_staged_messages) == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(
    ("backend", "device", "staged"),
    [
        ("gloo", "cuda", True),
        ("gloo", "cpu", False),
        ("nccl", "cuda", False),
        ("comm_core", "cuda", False),
        ("mpi", "cuda", True),
        ("cpu:comm_core,cuda:nccl", "cuda", False),
        ("cpu:gloo,cuda:gloo", "cuda", True),
    ],
)
def test_only_backends_that_take_a_gpus_address_for_their_own_are_staged(
    monkeypatch, backend, device, staged
):
    seen: list[bool] = []
    c: Any = object.__new__(communicators.Communicator)
    c.__dict__ |= {"groups": [None], "rank": 0, "size": 2}
    kinds = {kind: communicators.backend_for(backend, kind) for kind in ("cpu", "cuda")}
    c.native = frozenset(kind for kind, name in kinds.items() if name == "comm_core")
    c.streamed = frozenset(kind for kind, name in kinds.items() if "nccl" in name)
    monkeypatch.setattr(c, "_global_rank", lambda rank: rank, raising=False)
    monkeypatch.setattr(c, "_work", lambda *_: None, raising=False)
    monkeypatch.setattr(communicators, "Exchange", lambda *args: seen.append(args[4]))
    tensor = SimpleNamespace(device=torch.device(device), is_cuda=device == "cuda")
    c.exchange(tensor, tensor, peer=1)
    assert seen == [staged]


@pytest.mark.parametrize(
    ("backend", "gpus", "chosen"), [("comm_core", 2, [1]), ("comm_core", 1, []), ("nccl", 1, [0])]
)
def test_ranks_that_share_several_gpus_compute_on_their_own(monkeypatch, backend, gpus, chosen):
    """Events of another GPU than that of the tensors would tell nothing."""
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(runtime, "meet", lambda facts, timeout_s: None)
    monkeypatch.setattr(runtime, "_choose_interface", lambda facts: None)
    monkeypatch.setattr(runtime, "_gpu_clash", lambda facts, store: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **more: None)
    facts = SimpleNamespace(local_rank=gpus - 1, rank=3, world_size=4, local_world_size=4)
    runtime._join(facts, backend, 1.0)
    assert seen == chosen


def test_nccl_connects_all_ranks_of_a_channel_before_exchanges_of_some(monkeypatch):
    """A barrier without the GPU's number would go to the CPU's backend."""
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.distributed, "barrier", lambda group, device_ids: seen.append((group, device_ids))
    )
    c: Any = object.__new__(communicators.Communicator)
    c.groups, c.streamed = ["first", "second"], frozenset({"cuda"})
    c.connect(torch.device("cuda"), 1)
    c.connect(torch.device("cpu"), 1)
    assert seen == [("second", [3])]


def _broadcast_state() -> list[Any]:
    """State of rank 0 as it travels: where the tensors are, and what arrives."""
    c = runtime.communicator()
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1 * (c.rank + 1))
    parameter.grad = torch.ones(2) * (c.rank + 1)
    optimizer.step()
    moved: list[int] = []
    plain = torch.Tensor.cpu
    torch.Tensor.cpu = lambda tensor: moved.append(tensor.numel()) or plain(tensor)
    try:
        dear.broadcast_optimizer_state(optimizer)
    finally:
        torch.Tensor.cpu = plain
    mean = optimizer.state[parameter]["exp_avg"]
    return [sorted(moved)[:3], optimizer.param_groups[0]["lr"], *mean.tolist()]


def test_an_optimizers_state_travels_through_host_memory(pair):
    assert pair.run(_broadcast_state) == [[[1, 2, 2], 0.1, *[pytest.approx(0.1)] * 2]] * 2


def _dadt_beside_nccl() -> list[Any]:
    c = runtime.communicator()
    before, c.backend = c.backend, "cpu:comm_core,cuda:nccl"
    try:
        dadt.init()
        backend = current().cycles._execution._communicator.backend
        total = dadt.all_reduce(0, torch.ones(2))
        dadt.shutdown()
        return [backend, total.tolist()]
    finally:
        c.backend = before


def test_the_thread_of_dadt_leaves_nccl_to_the_script(pair):
    """NCCL may hang if two threads use two of its groups in different orders on the ranks."""
    assert pair.run(_dadt_beside_nccl) == [["comm_core", [2.0, 2.0]]] * 2
