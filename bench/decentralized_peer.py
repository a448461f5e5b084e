#!/usr/bin/env python3
"""`dear.decentralized` beside the package decent-dp: the same parameters, and steps per second.

  pip install --target PEER decent-dp loguru
  PYTHONPATH=PEER python bench/decentralized_peer.py --hosts netns --rate 1gbit -n 4

decent-dp (0.2.3) runs on Gloo, ours on the comm core; both train the same model on the same data
from the same start, in turns, while the other one's ranks are stopped. A step's time is that of the
slowest rank; a round's the median; a ratio the median over rounds, with its range. decent-dp
averages with the groups 1, 3, 4, 5, ... of a schedule (it leaves out the second); for the
comparison of parameters ours is told the same order. Exit status: 0 all well, 1 decent-dp is
missing or parameters differ, 2 a mistake in the options.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import session, table
from bench.output import Output
from bench.session import Session
from bench.table import Ratio
from dear.options import at_least
from dear.topology.schedules import TopologyReg

if TYPE_CHECKING:
    import numpy as np
    import torch

    from bench.rank import Place

SYSTEMS = {"comm_core": "dear", "gloo": "decent-dp"}
"""By the engine that each stands on."""
COMPARED_STEPS = 20
TOLERANCE = 1e-5
_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank trains.

    Attributes:
        layers: of `width` x `width` weights.
        batch: samples per rank and step.
        local: ranks per node, as topologies count them.
    """

    topology: str
    width: int
    layers: int
    batch: int
    local: int


@dataclass
class Case:
    """A topology: how far the parameters are apart, and by system the rounds' times."""

    difference: float | None = None
    step_s: dict[str, list[float]] = field(default_factory=lambda: {s: [] for s in SYSTEMS})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {s: [] for s in SYSTEMS})
    """Per rank and step, the mean over ranks."""

    @property
    def ratio(self) -> Ratio | None:
        """Steps per second of ours over those of decent-dp."""
        ours, theirs = self.step_s.values()
        return Ratio.of(theirs, ours) if ours and len(ours) == len(theirs) else None


def train(
    place: Place, job: dict[str, Any], steps: int, compare: bool
) -> tuple[np.ndarray | None, list[float], float]:
    """On one rank: parameters after `steps` (where they are compared), each step's seconds, and
    the process's CPU seconds per step."""
    import torch
    import torch.distributed as dist

    wanted = Job(**job)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(wanted.width, wanted.width) for _ in range(wanted.layers)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
    wrapped = _wrapped(place.name, model, wanted, compare)
    generator = torch.Generator().manual_seed(place.rank)
    times = []
    used = 0.0
    for step in range(steps):
        x = torch.randn(wanted.batch, wanted.width, generator=generator)
        if step == _WARM_UP:
            used = time.process_time()
        began = time.perf_counter()
        wrapped(x).square().mean().backward()
        times.append(time.perf_counter() - began)
    used = (time.process_time() - used) / max(1, steps - _WARM_UP)
    ended = torch.cat([param.detach().flatten() for param in model.parameters()])
    if SYSTEMS[place.name] == "dear":
        wrapped.close()
    dist.barrier()
    return (ended.numpy() if compare else None), times[_WARM_UP:], used


def _wrapped(engine: str, model: torch.nn.Module, job: Job, same_order: bool) -> Any:
    make = functools.partial(_sgd, lr=0.05)
    if SYSTEMS[engine] == "decent-dp":
        try:
            from decent_dp.ddp import DecentralizedDataParallel as Peer
            from loguru import logger
        except ImportError as error:
            raise RuntimeError(f"decent-dp is not there: {error}") from None
        logger.remove()
        return Peer(model, make, topology=job.topology, _local_world_size=job.local)
    from dear.decentralized import DecentralizedDataParallel

    topology = _as_the_peer_goes(job.topology) if same_order else job.topology
    return DecentralizedDataParallel(model, make, topology=topology, _local_world_size=job.local)


def _sgd(params: Any, lr: float) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD([param for _, param in params], lr=lr, momentum=0.9)


def _as_the_peer_goes(name: str) -> str:
    """A topology whose group t is group t + 1 of `name` from the second step on."""
    kind = TopologyReg.registry[name]
    renamed = f"{name} without its second group"

    class Shifted(kind):  # type: ignore[misc, valid-type]
        def _get_topo_edges(self) -> Any:
            edges = kind._get_topo_edges(self)
            order = [0, 1, *range(3, COMPARED_STEPS + 2)]
            return [edges[t % len(edges)] for t in order]

    if renamed not in TopologyReg.registry:
        TopologyReg.register(renamed)(Shifted)
        Shifted.name = name
    return renamed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    session.add_arguments(parser, list(SYSTEMS), world=4)
    add = parser.add_argument
    names = ["complete", "ring", "one-peer-exp", "alternating-exp-ring"]
    add("--topologies", nargs="+", default=names, metavar="NAME")
    add("--local", type=int, help="ranks per node as topologies count them (default: as needed)")
    add("--width", type=int, default=512, help="of a layer")
    add("--layers", type=int, default=24, help="of width x width weights")
    add("--batch", type=int, default=4, help="samples per rank")
    add("--steps", type=int, default=20, help="timed steps of a round")
    add("--repeats", type=int, default=5, help="rounds")
    args = parser.parse_args(argv)
    if args.local is not None:
        at_least("--local", args.local, 1)
    for name in ("width", "layers", "batch", "steps", "repeats"):
        at_least(f"--{name}", getattr(args, name), 1)
    for name in args.topologies:
        # A topology that this world cannot have is named before anything starts.
        local = _local(args, name)
        TopologyReg.make(name, world_size=args.ranks, rank=0, local_world_size=local)
    setup = session.setup_from(args)
    cases = {name: Case() for name in args.topologies}
    output = Output(args.json)
    try:
        with Session(setup) as running:
            print("\n".join(running.header()), flush=True)
            for name in cases:
                _compare(running, _job(args, name), cases[name])
            for index in range(args.repeats):
                for name, case in cases.items():
                    _round(running, _job(args, name), args.steps, case, index)
                output.save(_record(running, args, cases))
            print(_rendered(cases))
            for system, reason in running.failures.items():
                print(f"{SYSTEMS[system]}: {reason}")
            apart = any((case.difference or 0) > TOLERANCE for case in cases.values())
            return 1 if running.failures or apart else 0
    finally:
        output.close()


def _local(args: argparse.Namespace, topology: str) -> int:
    # decent-dp divides by zero where a node is one rank alone.
    return args.local or (2 if topology == "alternating-exp-ring" else 1)


def _job(args: argparse.Namespace, topology: str) -> dict[str, Any]:
    shared = {name: getattr(args, name) for name in ("width", "layers", "batch")}
    return {"topology": topology, "local": _local(args, topology), **shared}


def _compare(running: Session, job: dict[str, Any], case: Case) -> None:
    import numpy as np

    ends = []
    for system in running.setup.engines:
        arguments = {"job": job, "steps": COMPARED_STEPS, "compare": True}
        ranks = running.call(system, "bench.decentralized_peer", "train", **arguments)
        ends.append(ranks and [ended for ended, *_ in ranks])
    if len(ends) == 2 and all(ends):
        pairs = zip(*ends, strict=True)
        norm = np.linalg.norm
        case.difference = max(float(norm(a - b) / norm(b)) for a, b in pairs)


def _round(running: Session, job: dict[str, Any], steps: int, case: Case, index: int) -> None:
    # Who goes first alternates, as does whatever disturbs the machine.
    for system in list(running.setup.engines)[:: 1 if index % 2 == 0 else -1]:
        arguments = {"job": job, "steps": steps + _WARM_UP, "compare": False}
        ranks = running.call(system, "bench.decentralized_peer", "train", **arguments)
        if ranks is None:
            continue
        step_s = statistics.median(table.slowest([times for _, times, _ in ranks]))
        case.step_s[system].append(step_s)
        case.cpu_s[system].append(statistics.fmean(used for *_, used in ranks))
        what = f"{job['topology']}, {SYSTEMS[system]}"
        session.note(f"round {index + 1}: {what} {step_s * 1e3:.1f} ms")


def _record(running: Session, args: argparse.Namespace, cases: dict[str, Case]) -> dict[str, Any]:
    values = [
        {
            "topology": name,
            "ranks_per_node": _local(args, name),
            "relative_difference": case.difference,
            "step_s": {SYSTEMS[system]: times for system, times in case.step_s.items()},
            "cpu_s_per_rank_and_step": {SYSTEMS[s]: used for s, used in case.cpu_s.items()},
            "speedup": case.ratio and vars(case.ratio),
        }
        for name, case in cases.items()
    ]
    parameters = args.layers * (args.width**2 + args.width)
    record = running.record("bench/decentralized_peer")
    return record | {"parameters": parameters, "cases": values}


def _rendered(cases: dict[str, Case]) -> str:
    rows = []
    for name, case in cases.items():
        row = [name, "-" if case.difference is None else f"{case.difference:.1e}"]
        for times in case.step_s.values():
            row.append(table.digits(statistics.median(times) * 1e3) if times else "-")
        rows.append([*row, *([case.ratio.text(), case.ratio.spread()] if case.ratio else ["-"])])
    header = ["topology", "difference", *(f"{s} ms/step" for s in SYSTEMS.values())]
    return table.layout([*header, "speed-up", "range"], rows)


if __name__ == "__main__":
    session.program(main)
