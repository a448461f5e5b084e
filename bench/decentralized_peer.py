"""`dear.decentralized` beside the package decent-dp: the same parameters, and steps per second.

    pip install --target PEER decent-dp loguru
    PYTHONPATH=PEER python bench/decentralized_peer.py --ranks 4

decent-dp runs on Gloo, ours on the comm core. Both train the same model on the same data from the
same start, in turns. decent-dp averages with the groups 1, 3, 4, 5, ... of a schedule (it leaves
out the second); for the comparison of parameters ours is told the same order.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

SYSTEMS = ("dear", "decent-dp")
COMPARED_STEPS = 20


def make_model(width: int, layers: int) -> torch.nn.Sequential:
    torch.manual_seed(1)
    parts = [torch.nn.Linear(width, width) for _ in range(layers)]
    return torch.nn.Sequential(*(m for part in parts for m in (part, torch.nn.Tanh())))


def wrap(system: str, model: torch.nn.Module, topology: str, local: int, same_order: bool):
    make = functools.partial(_sgd, lr=0.05)
    if system == "decent-dp":
        from decent_dp.ddp import DecentralizedDataParallel as Peer

        return Peer(model, make, topology=topology, _local_world_size=local)
    from dear.decentralized import DecentralizedDataParallel, TopologyReg

    if same_order:
        topology = _as_the_peer_goes(TopologyReg, topology)
    return DecentralizedDataParallel(model, make, topology=topology, _local_world_size=local)


def _sgd(params, lr):
    return torch.optim.SGD([param for _, param in params], lr=lr, momentum=0.9)


def _as_the_peer_goes(registry, name: str) -> str:
    """A topology whose group t is group t + 1 of `name` from the second step on."""
    kind = registry.registry[name]
    renamed = f"{name} without its second group"

    class Shifted(kind):
        def _get_topo_edges(self):
            edges = kind._get_topo_edges(self)
            order = [0, 1, *range(3, COMPARED_STEPS + 2)]
            return [edges[t % len(edges)] for t in order]

    if renamed not in registry.registry:
        registry.register(renamed)(Shifted)
        Shifted.name = name
    return renamed


def rank_main(rank: int, folder: str, system: str, args: argparse.Namespace, job: dict) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), DEAR_STORE=f"{folder}/store")
    os.environ["LOCAL_WORLD_SIZE"] = str(args.ranks)
    import dear

    if system == "decent-dp":
        from loguru import logger

        logger.remove()
    dear.init(backend="comm_core" if system == "dear" else "gloo")
    model = wrap(
        system, make_model(args.width, args.layers), job["topology"], args.local, job["compare"]
    )
    generator = torch.Generator().manual_seed(rank)
    steps = COMPARED_STEPS if job["compare"] else args.steps
    times, used = [], []
    for _ in range(steps):
        x = torch.randn(args.batch, args.width, generator=generator)
        began, cpu = time.perf_counter(), time.process_time()
        model(x).square().mean().backward()
        times.append(time.perf_counter() - began)
        used.append(time.process_time() - cpu)
    state = torch.cat([p.detach().flatten() for p in model.parameters()])
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    torch.save((state, slowest[3:].tolist(), used[3:]), f"{folder}/rank{rank}")
    if system == "dear":
        model.close()
    dist.barrier()
    dear.shutdown()


def run(system: str, args: argparse.Namespace, **job) -> list:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (folder, system, args, job), nprocs=args.ranks)
        return [torch.load(Path(folder, f"rank{rank}")) for rank in range(args.ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--local", type=int, default=1, help="ranks per node, for the topologies")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24, help="of width x width weights")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank")
    parser.add_argument("--steps", type=int, default=23, help="per repeat; three are not counted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--topologies", default="complete,ring,one-peer-exp,alternating-exp-ring")
    args = parser.parse_args()
    for topology in args.topologies.split(","):
        ends = [run(system, args, topology=topology, compare=True) for system in SYSTEMS]
        off = max((a - b).norm() / b.norm() for (a, *_), (b, *_) in zip(*ends, strict=True))
        times = {system: [] for system in SYSTEMS}
        used = {system: [] for system in SYSTEMS}
        for _ in range(args.repeats):
            for system in SYSTEMS:
                ranks = run(system, args, topology=topology, compare=False)
                times[system].append(statistics.median(ranks[0][1]))
                used[system].append(statistics.mean(sum(per_rank[2]) for per_rank in ranks))
        median = {system: statistics.median(values) for system, values in times.items()}
        result = {
            "topology": topology,
            "ranks": args.ranks,
            "parameters": args.layers * (args.width**2 + args.width),
            "relative_difference": float(off),
            "step_s": times,
            "cpu_s_per_rank_and_step": {
                k: [v / (args.steps - 3) for v in vs] for k, vs in used.items()
            },
            "speedup": median["decent-dp"] / median["dear"],
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
