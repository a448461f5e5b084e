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

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import session, table
from bench.rig.output import note
from bench.rig.rank import Place
from bench.rig.table import Ratio
from dear.lazy import dist, np, torch
from dear.options import at_least
from dear.topology.schedules import TopologyReg

SYSTEMS = {"comm_core": "dear", "gloo": "decent-dp"}
"""By the engine that each stands on."""
COMPARED_STEPS = 20
TOLERANCE = 1e-5
_WARM_UP = 3


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
        return Ratio.of(theirs, ours)

    def record(self, topology: str, local: int) -> dict[str, Any]:
        """The case in the file."""
        return {
            "topology": topology,
            "ranks_per_node": local,
            "relative_difference": self.difference,
            "step_s": {SYSTEMS[system]: times for system, times in self.step_s.items()},
            "cpu_s_per_rank_and_step": {SYSTEMS[s]: used for s, used in self.cpu_s.items()},
            "speedup": self.ratio and vars(self.ratio),
        }


def train(
    place: Place,
    topology: str,
    local: int,
    width: int,
    layers: int,
    batch: int,
    steps: int,
    compare: bool,
) -> tuple[np.ndarray | None, list[float], float]:
    """On one rank: parameters after `steps` (where they are compared), each step's seconds, and
    the process's CPU seconds per step.

    Args:
        local: ranks per node, as topologies count them.
        layers: of `width` x `width` weights.
        batch: samples per rank and step.
    """
    torch.manual_seed(1)
    linear = [torch.nn.Linear(width, width) for _ in range(layers)]
    model = torch.nn.Sequential(*(part for layer in linear for part in (layer, torch.nn.Tanh())))
    wrapped = _wrapped(place.name, model, topology, local, compare)
    generator = torch.Generator().manual_seed(place.rank)
    times = []
    used = 0.0
    for step in range(steps):
        x = torch.randn(batch, width, generator=generator)
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


def _wrapped(
    engine: str, model: torch.nn.Module, topology: str, local: int, same_order: bool
) -> Any:
    if SYSTEMS[engine] == "decent-dp":
        try:
            from decent_dp.ddp import DecentralizedDataParallel as Peer
            from loguru import logger
        except ImportError as error:
            raise RuntimeError(f"decent-dp is not there: {error}") from None
        logger.remove()
        return Peer(model, _sgd, topology=topology, _local_world_size=local)
    from dear.decentralized import DecentralizedDataParallel

    if same_order:
        topology = _as_the_peer_goes(topology)
    return DecentralizedDataParallel(model, _sgd, topology=topology, _local_world_size=local)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for _, param in params], lr=0.05, momentum=0.9)


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
    parser = session.parser_of(__doc__, list(SYSTEMS), world=4)
    add = parser.add_argument
    names = ["complete", "ring", "one-peer-exp", "alternating-exp-ring"]
    add("--topologies", nargs="+", default=names, metavar="NAME")
    add("--local", type=int, help="ranks per node as topologies count them (default: as needed)")
    add("--width", type=int, default=512, help="of a layer")
    add("--layers", type=int, default=24, help="of width x width weights")
    add("--batch", type=int, default=4, help="samples per rank")
    add("--steps", type=int, default=20, help="timed steps of a round")
    add("--repeats", type=int, default=5, help="rounds")
    args = session.parse(parser, argv)
    if args.local is not None:
        at_least("--local", args.local, 1)
    for name in ("width", "layers", "batch", "steps", "repeats"):
        at_least(f"--{name}", getattr(args, name), 1)
    wanted = {"width": args.width, "layers": args.layers, "batch": args.batch}
    jobs = {}
    for name in args.topologies:
        # decent-dp divides by zero where a node is one rank alone.
        local = args.local or (2 if name == "alternating-exp-ring" else 1)
        jobs[name] = {"topology": name, "local": local, **wanted}
        # A topology that this world cannot have is named before anything starts.
        TopologyReg.make(name, world_size=args.world, rank=0, local_world_size=local)
    cases = {name: Case() for name in args.topologies}
    with session.started("bench/decentralized_peer", args) as running:
        ends: dict[tuple[str, str], list[np.ndarray]] = {}
        once = {"steps": COMPARED_STEPS, "compare": True}
        for name, system, ranks in running.round(train, {n: jobs[n] | once for n in jobs}):
            ends[name, system] = [ended for ended, *_ in ranks]
        for name, case in cases.items():
            both = [ends[name, system] for system in args.engines if (name, system) in ends]
            if len(both) == 2:
                norm = np.linalg.norm
                apart = (norm(a - b) / norm(b) for a, b in zip(*both, strict=True))
                case.difference = float(max(apart))
        often = {"steps": args.steps + _WARM_UP, "compare": False}
        timed = {name: job | often for name, job in jobs.items()}
        for index in range(args.repeats):
            # Who goes first alternates, as does whatever disturbs the machine.
            for name, system, ranks in running.round(train, timed, backwards=index % 2 == 1):
                step_s = statistics.median(table.slowest([times for _, times, _ in ranks]))
                cases[name].step_s[system].append(step_s)
                cases[name].cpu_s[system].append(statistics.fmean(used for *_, used in ranks))
                note(f"round {index + 1}: {name}, {SYSTEMS[system]} {step_s * 1e3:.1f} ms")
            running.save(
                parameters=args.layers * (args.width**2 + args.width),
                cases=[case.record(name, jobs[name]["local"]) for name, case in cases.items()],
            )
        print(rendered(cases))
        for system, reason in running.failures.items():
            print(f"{SYSTEMS[system]}: {reason}")
        differs = any((case.difference or 0) > TOLERANCE for case in cases.values())
        return 1 if running.failures or differs else 0


def rendered(cases: dict[str, Case]) -> str:
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
