#!/usr/bin/env python3
"""Comparison of `dear.decentralized` with the package decent-dp: parameters, and steps per second.

  pip install --target PEER decent-dp loguru
  PYTHONPATH=PEER python bench/decentralized_peer.py --hosts netns --rate 1gbit -n 4

decent-dp (0.2.3) runs on Gloo, `dear.decentralized` on the comm core. Both train the same model on
the same data from the same start. They take turns: while one trains, the ranks of the other are
stopped. The time of a step is the slowest rank's, the time of a round is the median of its steps,
and a ratio is the median over rounds. decent-dp leaves out the second group of ranks of a schedule
(it uses groups 1, 3, 4, 5, ...). Where parameters are compared, `dear.decentralized` uses the same
order. Exit status: 0; 1 if decent-dp is missing or parameters differ; 2 for a user error.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import program, session, table
from bench.rig.output import note
from bench.rig.rank import Place
from bench.rig.table import Ratio
from common.results.tables.cells import significant
from dear.lazy import dist, np, torch
from dear.options import at_least
from dear.topology.schedules import TopologyReg

SYSTEMS = {"comm_core": "dear", "gloo": "decent-dp"}
"""Name of the compared package, by the engine that it runs on."""
COMPARED_STEPS = 20
TOLERANCE = 1e-5
_WARM_UP = 3


@dataclass
class Case:
    """Results for a topology: difference of the parameters, and each package's time per round."""

    topology: str
    ranks_per_node: int
    relative_difference: float | None = None
    step_s: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> Ratio | None:
        """Steps per second of `dear.decentralized`, divided by those of decent-dp."""
        ours, theirs = (self.step_s.get(system, []) for system in SYSTEMS.values())
        return Ratio.of(theirs, ours)


def train(
    place: Place,
    topology: str,
    local: int,
    width: int,
    layers: int,
    batch: int,
    steps: int,
    compare: bool,
) -> tuple[np.ndarray | None, list[float]]:
    """Trains on one rank.

    Args:
        local: ranks per node for the topology.
        layers: number of layers of `width` x `width` weights.
        batch: samples per rank and step.
        compare: whether parameters are compared.

    Returns:
        The parameters at the end if they are compared, and the seconds of each step.
    """
    torch.manual_seed(1)
    linear = [torch.nn.Linear(width, width) for _ in range(layers)]
    model = torch.nn.Sequential(*(part for layer in linear for part in (layer, torch.nn.Tanh())))
    wrapped = _wrapped(place.name, model, topology, local, compare)
    generator = torch.Generator().manual_seed(place.rank)
    times = []
    for _ in range(steps):
        x = torch.randn(batch, width, generator=generator)
        began = time.perf_counter()
        wrapped(x).square().mean().backward()
        times.append(time.perf_counter() - began)
    parameters = torch.cat([param.detach().flatten() for param in model.parameters()])
    if SYSTEMS[place.name] == "dear":
        wrapped.close()
    dist.barrier()
    return (parameters.numpy() if compare else None), times[_WARM_UP:]


def _wrapped(
    engine: str, model: torch.nn.Module, topology: str, local: int, same_order: bool
) -> Any:
    if SYSTEMS[engine] == "decent-dp":
        try:
            from decent_dp.ddp import DecentralizedDataParallel
            from loguru import logger
        except ImportError as error:
            raise RuntimeError(f"decent-dp is not installed: {error}") from None
        logger.remove()
    else:
        from dear.decentralized import DecentralizedDataParallel

        topology = _without_second_group(topology) if same_order else topology

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([param for _, param in params], lr=0.05, momentum=0.9)

    return DecentralizedDataParallel(model, sgd, topology=topology, _local_world_size=local)


def _without_second_group(name: str) -> str:
    """Registers a topology with the groups that decent-dp uses, and returns its name."""
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
    parser = session.parser(__doc__, list(SYSTEMS), world=4)
    add = parser.add_argument
    names = ["complete", "ring", "one-peer-exp", "alternating-exp-ring"]
    add("--topologies", nargs="+", default=names, metavar="NAME", help="topologies")
    add("--local", type=int, help="ranks per node for topologies; default: 1 or 2")
    add("--width", type=int, default=512, help="width of a layer")
    add("--layers", type=int, default=24, help="number of layers")
    add("--batch", type=int, default=4, help="samples per rank")
    add("--steps", type=int, default=20, help="timed steps of a round")
    args = session.parse(parser, argv)
    for name in ("local", "width", "layers", "batch", "steps"):
        at_least(f"--{name}", getattr(args, name), 1)
    model = {"width": args.width, "layers": args.layers, "batch": args.batch}
    jobs, cases = {}, {}
    for name in args.topologies:
        # decent-dp divides by zero if a node has a single rank.
        local = args.local or (2 if name == "alternating-exp-ring" else 1)
        jobs[name] = {"topology": name, "local": local, **model}
        cases[name] = Case(topology=name, ranks_per_node=local)
        # Raises for a topology that this world cannot have, before anything starts.
        TopologyReg.make(name, world_size=args.world, rank=0, local_world_size=local)
    with session.started("bench/decentralized_peer", args) as running:
        parameters: dict[str, list[list[np.ndarray]]] = {name: [] for name in cases}
        once = {"steps": COMPARED_STEPS, "compare": True}
        for name, _, ranks in running.round(train, {n: jobs[n] | once for n in jobs}):
            parameters[name].append([rank[0] for rank in ranks])
        for name, case in cases.items():
            if len(parameters[name]) == 2:
                norm = np.linalg.norm
                pairs = zip(*parameters[name], strict=True)
                case.relative_difference = max(float(norm(a - b) / norm(b)) for a, b in pairs)
        often = {"steps": args.steps + _WARM_UP, "compare": False}
        timed = {name: job | often for name, job in jobs.items()}
        for index in range(args.repeats):
            # The package that goes first alternates, so that other load hits both equally.
            for name, engine, ranks in running.round(train, timed, backwards=index % 2 == 1):
                system, case = SYSTEMS[engine], cases[name]
                step_s = statistics.median(table.slowest([times for _, times in ranks]))
                case.step_s.setdefault(system, []).append(step_s)
                note(f"round {index + 1}: {name}, {system} {step_s * 1e3:.1f} ms")
            kept = [dataclasses.asdict(case) for case in cases.values()]
            running.save(parameters=args.layers * (args.width**2 + args.width), cases=kept)
        print(rendered(cases))
        for engine, reason in running.failures.items():
            print(f"{SYSTEMS[engine]}: {reason}")
        differs = any((case.relative_difference or 0) > TOLERANCE for case in cases.values())
        return 1 if running.failures or differs else 0


def rendered(cases: dict[str, Case]) -> str:
    """Returns a row per topology."""
    rows = []
    for name, case in cases.items():
        difference = case.relative_difference
        row = [name, "-" if difference is None else f"{difference:.1e}"]
        for system in SYSTEMS.values():
            times = case.step_s.get(system)
            row.append(significant(statistics.median(times) * 1e3) if times else "-")
        rows.append([*row, case.ratio.text() if case.ratio else "-"])
    header = ["topology", "difference", *(f"{system} ms/step" for system in SYSTEMS.values())]
    return table.layout([*header, "speed-up"], rows)


if __name__ == "__main__":
    program.run(main)
