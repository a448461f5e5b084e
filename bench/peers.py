#!/usr/bin/env python3
"""Comparison of this project's optimizers with packages for the same purpose, on the same work.

  pip install --target PEER decent-dp loguru
  PYTHONPATH=PEER python bench/peers.py --hosts netns --rate 1gbit -n 4

All systems train the same model on the same data from the same start, each with its own defaults:

  torch-ddp, torch-fsdp2         torch's DistributedDataParallel and `fully_shard`, over Gloo
  horovod                        Horovod's DistributedOptimizer, over Open MPI
  gloo, mpi, comm-core           one all-reduce of all gradients after the backward pass
  dear, dear-ddp                 `dear.DistributedOptimizer` with the algorithms dear and ddp
  decent-dp, dear-decentralized  the package decent-dp over Gloo, and `dear.decentralized`
  plain                          no communication

The systems take turns. In each round, each system trains in new processes, while no other runs. The
time of a step is the slowest rank's, the time of a round is the median of its steps, and a ratio is
the median over rounds. The difference is that of the parameters after all steps of the first round,
relative to their change since the start.
CPU is the time that a rank's threads run on a core. Peak memory is that of the largest rank, minus
its memory before the model was built. us/tensor: the time that a system adds to a step of `plain`,
divided by the number of tensors.

decent-dp (0.2.3) leaves out the second group of ranks of a schedule (it uses groups 1, 3, 4, ...).
Here, `dear-decentralized` uses the same order. Exit status: 0; 1 if a system is missing or has
failed, or parameters differ; 2 for a user error.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import dear
from bench.rig import program, session, table
from bench.rig.output import note
from bench.rig.rank import Place
from bench.rig.table import Ratio
from bench.rig.team import Layout, Teams
from bench.wrappers import MIB, AddedMemory
from common.results.tables.cells import significant
from dear.errors import UserError, unknown
from dear.lazy import np, torch
from dear.options import at_least
from dear.topology.schedules import TopologyReg

TOLERANCE = 1e-3
"""Largest relative difference of right results, which are rounded in other orders."""
_WARM_UP = 3


@dataclass
class Training:
    """Model and optimizer of a system.

    Attributes:
        model: the module to call.
        optimizer: None if the backward pass updates the parameters.
        before_step: called between the backward pass and `optimizer.step()`.
        end: called after the last step, before the parameters are read.
    """

    model: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    before_step: Callable[[], object] = lambda: None
    end: Callable[[], object] = lambda: None

    def step(self, x: torch.Tensor) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.before_step()
        if self.optimizer is not None:
            self.optimizer.step()


@dataclass(frozen=True, kw_only=True)
class System:
    """Package, or part of a package.

    Attributes:
        engine: engine of `bench.rig.engines` that its ranks join.
        start: makes the training of a model.
        against: the system that it is compared with; None: not compared.
    """

    engine: str
    start: Callable[[Place, torch.nn.Sequential, str, int], Training]
    against: str | None = "torch-ddp"


def sgd(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def plain(place: Place, model: torch.nn.Sequential, *_: object) -> Training:
    return Training(model, sgd(model.parameters()))


def torch_ddp(place: Place, model: torch.nn.Sequential, *_: object) -> Training:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    return Training(wrapped, sgd(wrapped.parameters()))


def torch_fsdp2(place: Place, model: torch.nn.Sequential, *_: object) -> Training:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return Training(model, sgd(model.parameters()))


def horovod(place: Place, model: torch.nn.Sequential, *_: object) -> Training:
    import horovod.torch as hvd

    named = list(model.named_parameters())
    return Training(model, hvd.DistributedOptimizer(sgd(model.parameters()), named))


def all_reduce(place: Place, model: torch.nn.Sequential, *_: object) -> Training:
    params = list(model.parameters())

    def average() -> None:
        flat = place.engine.all_reduce(torch.cat([param.grad.flatten() for param in params]))
        flat /= place.size
        for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            param.grad.copy_(part.view_as(param))

    return Training(model, sgd(params), before_step=average)


def dear_exact(place: Place, model: torch.nn.Sequential, *_: object) -> Training:
    return _dear(model, "dear")


def dear_ddp(place: Place, model: torch.nn.Sequential, *_: object) -> Training:
    return _dear(model, "ddp")


def _dear(model: torch.nn.Sequential, algorithm: str) -> Training:
    dear.init()
    optimizer = dear.DistributedOptimizer(sgd(model.parameters()), model, algorithm=algorithm)
    return Training(model, optimizer, end=optimizer.synchronize)


def decent_dp(place: Place, model: torch.nn.Sequential, topology: str, local: int) -> Training:
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    return _decentralized(DecentralizedDataParallel, model, topology, local)


def dear_decentralized(
    place: Place, model: torch.nn.Sequential, topology: str, local: int
) -> Training:
    from dear.decentralized import DecentralizedDataParallel

    shifted = _without_second_group(topology)
    training = _decentralized(DecentralizedDataParallel, model, shifted, local)
    return dataclasses.replace(training, end=training.model.close)  # type: ignore[attr-defined]


def _decentralized(wrapper: Any, model: torch.nn.Sequential, topology: str, local: int) -> Training:
    def named(params: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        return sgd([param for _, param in params])

    return Training(wrapper(model, named, topology=topology, _local_world_size=local), None)


def _without_second_group(name: str) -> str:
    """Registers a topology with the groups that decent-dp uses, and returns its name."""
    kind = TopologyReg.registry[name]
    renamed = f"{name} without its second group"

    class Shifted(kind):  # type: ignore[misc, valid-type]
        def _get_topo_edges(self) -> Any:
            edges = kind._get_topo_edges(self)
            # A whole number of periods follows, so that the order repeats.
            order = [0, 1, *range(3, 3 + 100 * len(edges))]
            return [edges[t % len(edges)] for t in order]

    if renamed not in TopologyReg.registry:
        TopologyReg.register(renamed)(Shifted)
        Shifted.name = name
    return renamed


SYSTEMS = {
    "plain": System(engine="comm_core", start=plain, against=None),
    "torch-ddp": System(engine="gloo", start=torch_ddp, against=None),
    "torch-fsdp2": System(engine="gloo", start=torch_fsdp2),
    "horovod": System(engine="horovod", start=horovod),
    "gloo": System(engine="gloo", start=all_reduce),
    "mpi": System(engine="mpi", start=all_reduce),
    "comm-core": System(engine="comm_core", start=all_reduce),
    "dear": System(engine="comm_core", start=dear_exact),
    "dear-ddp": System(engine="comm_core", start=dear_ddp),
    "decent-dp": System(engine="gloo", start=decent_dp, against=None),
    "dear-decentralized": System(engine="comm_core", start=dear_decentralized, against="decent-dp"),
}
_DECENTRALIZED = ("decent-dp", "dear-decentralized")


@dataclass
class Case:
    """Results of a system, one per round; see the top of this file.

    Attributes:
        topology: None but for decentralized systems.
        local: ranks per node for the topology.
        difference: norm of the difference of the parameters from those of `against`, divided by
            the norm of the change of these since the start; the largest of all ranks. None: nothing
            to compare with.
        failure: why the system has no results, or no further ones.
    """

    system: str
    topology: str | None = None
    local: int = 1
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    difference: float | None = None
    failure: str | None = None

    @property
    def name(self) -> str:
        return self.system if self.topology is None else f"{self.system} {self.topology}"

    @property
    def against(self) -> str | None:
        """Name of the case that this one is compared with."""
        other = SYSTEMS[self.system].against
        return other if other is None or self.topology is None else f"{other} {self.topology}"


def train(
    place: Place,
    system: str,
    topology: str | None,
    local: int,
    width: int,
    layers: int,
    batch: int,
    steps: int,
    compare: bool,
) -> dict[str, Any]:
    """Trains on one rank; arguments as of the command line.

    Returns:
        `step_s` and `cpu_s` of each timed step, `peak_bytes`, and, to be compared, the `change` of
        all parameters (float32 array).
    """
    plain(place, torch.nn.Sequential(torch.nn.Linear(1, 1))).step(torch.ones(1, 1))
    added = AddedMemory()  # does not count what torch loads at its first step
    model = _model(width, layers)
    training = SYSTEMS[system].start(place, model, topology, local)
    generator = torch.Generator().manual_seed(place.rank)
    step_s, cpu_s = [], []
    for _ in range(_WARM_UP + steps):
        x = torch.randn(batch, width, generator=generator)
        began, cpu_began = time.perf_counter(), time.process_time()
        training.step(x)
        step_s.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - cpu_began)
    training.end()
    results: dict[str, Any] = {"step_s": step_s[_WARM_UP:], "cpu_s": cpu_s[_WARM_UP:]}
    results["peak_bytes"] = added.peak_bytes
    if compare:
        start = _flat(_model(width, layers).parameters())
        whole = (getattr(param, "full_tensor", lambda p=param: p)() for param in model.parameters())
        results["change"] = (_flat(whole) - start).numpy()
    place.meet()
    return results


def _model(width: int, layers: int) -> torch.nn.Sequential:
    """Returns the model, with equal parameters in all processes."""
    torch.manual_seed(1)
    linear = [torch.nn.Linear(width, width) for _ in range(layers)]
    for layer in linear:
        torch.nn.init.xavier_normal_(layer.weight)  # gradients neither vanish nor explode
    return torch.nn.Sequential(*(part for layer in linear for part in (layer, torch.nn.Tanh())))


def _flat(params: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in params])


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    cases = list(_cases(args))
    work = {"width": args.width, "layers": args.layers, "batch": args.batch, "steps": args.steps}
    changes: dict[str, list[np.ndarray]] = {}
    versions = _versions(args.systems)
    with session.started("bench/peers", args) as running:
        for index in range(args.repeats):
            # The order alternates, so that other load hits all systems equally.
            for case in cases if index % 2 == 0 else reversed(cases):
                if case.failure is not None:
                    continue
                job = {"topology": case.topology, "local": case.local, **work}
                job["compare"] = index == 0
                _measure(case, running.layout, job, changes, versions)
                kept = [dataclasses.asdict(case) for case in cases]
                running.save(work=work, packages=versions, cases=kept)
        print(
            f"# {2 * args.layers} tensors, {args.layers * (args.width + 1) * args.width} parameters"
        )
        print("#", ", ".join(f"{name} {version}" for name, version in versions.items()))
        print(rendered(cases, 2 * args.layers))
    # Written so that a difference that is not a number is wrong, too.
    right = all(not case.failure and (case.difference or 0) <= TOLERANCE for case in cases)
    return 0 if right else 1


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = session.parser(__doc__, [], world=4)
    add = parser.add_argument
    add("--systems", nargs="+", default=list(SYSTEMS), metavar="NAME", help="systems to compare")
    add("--topologies", nargs="+", metavar="NAME",
        help="topologies of the decentralized systems; one-peer-exp if None")  # fmt: skip
    add("--width", type=int, default=512, help="width of a layer")
    add("--layers", type=int, default=48, help="number of layers")
    add("--batch", type=int, default=32, help="samples per rank")
    add("--steps", type=int, default=10, help="timed steps of a round")
    args = session.parse(parser, argv)
    for name in ("width", "layers", "batch", "steps"):
        at_least(f"--{name}", getattr(args, name), 1)
    for name in args.systems:
        if name not in SYSTEMS:
            raise unknown("system", name, SYSTEMS)
        other = SYSTEMS[name].against
        if other is not None and other not in args.systems:
            raise UserError(f"--systems: {name} is compared with {other}; name both")
    session.check_unique("--systems", args.systems)
    if args.topologies and not set(_DECENTRALIZED) & set(args.systems):
        raise UserError("--topologies: no system of --systems has one")
    args.topologies = args.topologies or ["one-peer-exp"]
    session.check_unique("--topologies", args.topologies)
    return args


def _versions(systems: list[str]) -> dict[str, str]:
    """Returns the versions of packages; `_measure` adds those that an engine's ranks report."""
    try:
        return {"decent-dp": version("decent-dp")} if "decent-dp" in systems else {}
    except PackageNotFoundError:
        raise UserError(
            "decent-dp is not installed: `pip install --target PEER decent-dp loguru`, then "
            "PYTHONPATH=PEER; or leave it out with --systems"
        ) from None


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yields the cases, each after the one that it is compared with. Raises `UserError` for a
    topology that this world cannot have."""
    systems = [name for name in SYSTEMS if name in args.systems]
    yield from (Case(system=name) for name in systems if name not in _DECENTRALIZED)
    decentralized = [name for name in systems if name in _DECENTRALIZED]
    for topology, name in itertools.product(args.topologies, decentralized):
        # decent-dp divides by zero if a node has a single rank.
        local = 2 if topology == "alternating-exp-ring" else 1
        TopologyReg.make(topology, world_size=args.world, rank=0, local_world_size=local)
        yield Case(system=name, topology=topology, local=local)


def _measure(
    case: Case,
    layout: Layout,
    job: dict[str, object],
    changes: dict[str, list[np.ndarray]],
    versions: dict[str, str],
) -> None:
    """Starts the ranks of a system, trains, and adds the results to the case. `changes` gets
    those that others are compared with, by case and rank; `versions` gets those of packages."""
    engine = SYSTEMS[case.system].engine
    with Teams([engine], layout) as teams:
        versions |= teams.started[engine].versions if engine in teams.started else {}
        for _, _, ranks in teams.round(train, {case.name: {"system": case.system} | job}):
            step_s = table.slowest([rank["step_s"] for rank in ranks])
            case.step_s.append(statistics.median(step_s))
            case.cpu_s.append(statistics.mean(statistics.mean(rank["cpu_s"]) for rank in ranks))
            case.peak_bytes.append(max(rank["peak_bytes"] for rank in ranks))
            if job["compare"] and case.against is None:
                changes[case.name] = [rank["change"] for rank in ranks]
            elif job["compare"] and case.against in changes:
                others = changes[case.against]
                case.difference = difference([rank["change"] for rank in ranks], others)
            note(f"{case.name}: {case.step_s[-1] * 1e3:.1f} ms")
        case.failure = teams.failures.get(engine)


def difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Returns the largest relative difference over ranks; each list has the change of each rank."""
    norm = np.linalg.norm
    return float(np.max([norm(a - b) / norm(b) for a, b in zip(ours, theirs, strict=True)]))


def rendered(cases: list[Case], tensors: int) -> str:
    """Returns a row per system."""
    by_name = {case.name: case for case in cases}
    idle = by_name.get("plain")
    rows = []
    for case in cases:
        other = by_name.get(case.against or "")
        ratio = Ratio.of(other.step_s, case.step_s) if other is not None else None
        speed_up = f"{ratio.text()} over {case.against}" if ratio is not None else "-"
        if not case.step_s:
            rows.append([case.name, "-", case.failure or ""])
            continue
        step_s, cpu_s = statistics.median(case.step_s), statistics.median(case.cpu_s)
        row = [case.name, significant(step_s * 1e3), _spread(case.step_s)]
        added = (step_s - statistics.median(idle.step_s)) * 1e6 if idle and idle.step_s else None
        row.append("-" if added is None or case is idle else significant(added / tensors))
        row += [significant(cpu_s * 1e3), f"{max(case.peak_bytes) / MIB:.0f}"]
        row.append("-" if case.difference is None else f"{case.difference:.1e}")
        rows.append([*row, speed_up, *([case.failure] if case.failure else [])])
    header = ["system", "ms/step", "range", "us/tensor", "CPU ms/step", "peak MiB", "difference"]
    return table.layout([*header, "speed-up"], rows)


def _spread(times: list[float]) -> str:
    return f"{significant(min(times) * 1e3)}..{significant(max(times) * 1e3)}"


if __name__ == "__main__":
    program.run(main)
