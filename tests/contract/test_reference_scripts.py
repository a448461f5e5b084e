"""Scripts as those of the references are written: only the line with their import is another one.

Each trains a small model on every rank; replicas that should be equal must be, and what a reference
computes is computed.
"""

from __future__ import annotations

import math
import textwrap
from typing import Any

import pytest

SETTING = """
import torch
from torch import nn
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)
criterion = nn.CrossEntropyLoss()
"""

DEAR = """
import dear
dear.init()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dear.size(), momentum=0.9)
optimizer = dear.DistributedOptimizer(
    optimizer, model=model, compression=None, is_sparse=False, density=1.0, seq_layernames=None,
    layerwise_times=None, norm_clip=None, threshold=25, writer=None, gradient_path="./", fp16=False,
    mgwfbp=False, rdma=True, multi_job_scheduling=False, exclude_parts="")
dear.broadcast_parameters(model.state_dict(), root_rank=0)
dear.broadcast_optimizer_state(optimizer, root_rank=0)
losses = []
for step in range(4):
    x, y = batch(dear.rank(), step)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(dear.allreduce(loss.detach(), name="avg_loss").item())
"""

MG_WFBP = """
import dear as hvd  # distributed_optimizer
hvd.init()
names = [name for name, _ in model.named_parameters()]
class NoneCompressor:  # of its compression.py
    pass
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=NoneCompressor,
    is_sparse=False, density=1, seq_layernames=names, layerwise_times=[1e-5, 2e-5, 3e-5, 4e-5],
    norm_clip=None,
    threshold=0, writer=None, gradient_path=None)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(4):
    optimizer.zero_grad()
    for part in range(2):  # nsteps_update
        optimizer.local = part == 0
        x, y = batch(hvd.rank(), 2 * step + part)
        criterion(model(x), y).backward()
    optimizer.step()
"""

HOROVOD = """
import dear as hvd  # horovod.torch
hvd.init()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(4):
    x, y = batch(hvd.rank(), step)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
assert 0 <= hvd.local_rank() < hvd.local_size()
"""

DADT = """
import dear.dadt as dadt
dadt.init(cycle_duration_ms=2, all_reduce_buffer_size=1 << 20, group_buffer_size=1 << 20)
optimizer = dadt.DistributedOptimizer(
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
for step in range(4):
    x, y = batch(dadt.rank(), step)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
dadt.barrier()
first = dadt.all_reduce_async(7, torch.ones(3))
second = dadt.all_reduce_async(7, torch.zeros(3))
assert first.tolist() == [0.0] * 3 and second.tolist() == [float(dadt.size())] * 3
"""

DECENT_DP = """
from dear.decentralized import DecentralizedDataParallel, initialize_dist, optim_fn_adamw
rank, world_size = initialize_dist()
model = DecentralizedDataParallel(model, optim_fn_adamw, topology="complete", grad_clip_norm=1.0)
for step in range(4):
    x, y = batch(rank, step)
    criterion(model(x), y).backward()
model.global_avg(will_revert=False)
"""

BLUEFOG = """
import dear.bluefog as bf
from dear.bluefog import topology_util
bf.init()
bf.set_topology(topology_util.RingGraph(bf.size()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = bf.DistributedAdaptWithCombineOptimizer(
    optimizer, model=model, communication_type=bf.CommunicationType.neighbor_allreduce)
bf.broadcast_parameters(model.state_dict(), root_rank=0)
bf.broadcast_optimizer_state(optimizer, root_rank=0)
peers = topology_util.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
for step in range(4):
    send, receive = next(peers)
    optimizer.dst_weights = dict.fromkeys(send, 1.0)
    optimizer.src_weights = {r: 1 / (len(receive) + 1) for r in receive}
    optimizer.self_weight = 1 / (len(receive) + 1)
    x, y = batch(bf.rank(), step)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
bf.win_create(torch.ones(2), "w")
bf.win_put(torch.full((2,), float(bf.rank())), "w")
bf.barrier()
bf.win_update("w")
bf.win_free("w")
assert bf.mpi_threads_supported() in (True, False)
for name, param in model.named_parameters():
    param.data.copy_(bf.allreduce(param.data, average=True, name=name))
"""

ASYNCDDP = """
import dear.bluefog as bf
from dear.bluefog.ddp import DecentralizedDataParallel, LocalStepRandomBatchSampler
from dear.decentralized import lr_scheduler_fn_cosine_with_warmup, optim_fn_adam
from functools import partial
bf.init()
assert bf.is_available() and bf.is_initialized()
model = DecentralizedDataParallel(
    model, optim_fn_adam, partial(lr_scheduler_fn_cosine_with_warmup, t_max=10, t_warmup=2),
    sync=False, bucket_size_in_mb=25)
model.set_topology({"topology": bf.topology_util.ExponentialTwoGraph(bf.size()), "name": "exp"})
data = [batch(0, step) for step in range(10)]
sampler = LocalStepRandomBatchSampler(data, 1, 7, rank=bf.rank())
for number, (place,) in enumerate(sampler):
    if number == 3 + bf.rank():  # at each rank's own pace
        break
    x, y = data[place]
    criterion(model(x), y).backward()
model.global_avg()
model.close()
"""


def _run(script: str) -> list[list[float]]:
    space: dict[str, Any] = {}
    exec(textwrap.dedent(SETTING), space)
    exec(textwrap.dedent(script), space)
    if hasattr(space.get("optimizer"), "close"):
        space["optimizer"].close()
    return [param.detach().flatten().tolist() for param in space["model"].parameters()]


@pytest.mark.parametrize(
    "script",
    [DEAR, MG_WFBP, HOROVOD, DADT, DECENT_DP, BLUEFOG, ASYNCDDP],
    ids=["DeAR", "MG-WFBP", "Horovod", "DADT", "Decent-DP", "BlueFog", "Asyncddp"],
)
def test_a_script_runs_with_another_import_line(own_pool, script):
    results = own_pool(2).run(_run, script)
    assert all(math.isfinite(value) for values in results[0] for value in values)
    for ours, theirs in zip(*results, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7), "replicas differ"


def test_what_scripts_of_two_references_compute_is_the_same(own_pool):
    """DeAR's and Horovod's train on the same batches, with gradients averaged."""
    dear, horovod = (own_pool(2).run(_run, script)[0] for script in (DEAR, HOROVOD))
    for ours, theirs in zip(dear, horovod, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
