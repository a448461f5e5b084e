"""The contract of a data-parallel training algorithm, and how its file is found.

An algorithm is one file in a folder of `dear/algorithms/`. The folder says what is promised about
the replicas; the file name (with dashes for underscores) is the algorithm's name on the command
line, in records and in plots. The file defines one subclass of `Algorithm` and takes torch from
`dear.lazy`, so that listing and checking never import torch. Files whose names begin with an
underscore are no algorithms.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from dear.comm.communicator import Communicator
from dear.cost.bounds import Bound, Traffic
from dear.cost.overlap import Overlap, Unstated
from dear.errors import Unavailable, unknown
from dear.lazy import torch
from dear.options import Options, build_options
from dear.training.engine import Engine, Replica, distribute

FOLDER = Path(__file__).parents[1] / "algorithms"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an algorithm promises and needs; the harness checks it before it starts anything."""

    consistency: Literal["synchronous", "delayed", "decentralized", "asynchronous"]
    """`synchronous`: after each step all replicas equal serial training on the joined batch."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    min_world_size: int = 1


class Algorithm(ABC):
    """How gradients (or parameters) of the replicas are brought together, and when."""

    Options: ClassVar[type[Options]] = Options
    capabilities: ClassVar[Capabilities]
    bound: ClassVar[Bound | None] = None
    """Which formula of `dear.cost.bounds` says how short a step can be; None: none is known."""
    overlap: ClassVar[Overlap | Unstated | None] = None
    """When transfers start and what waits for them (`dear.cost.overlap`). The tests refuse None."""

    @classmethod
    def bound_of(cls, options: Any) -> Bound | None:
        """The formula with these options."""
        return cls.bound

    @classmethod
    def overlap_of(cls, options: Any) -> Overlap | Unstated | None:
        """The statement with these options."""
        return cls.overlap

    @classmethod
    def traffic(cls, options: Any, world_size: int, local_size: int) -> Traffic | None:
        """What ranks exchange with a few others; None: all take part in the same collectives.

        Args:
            options: of this algorithm.
            local_size: ranks per host.

        Raises:
            UserError: such a world is not possible.
        """
        return None

    @classmethod
    def period(cls, options: Any, world_size: int, local_size: int) -> int:
        """Steps after which what a rank does repeats; arguments and errors as of `traffic`.

        Only whole periods say how long a step takes in the mean.
        """
        traffic = cls.traffic(options, world_size, local_size)
        return 1 if traffic is None else len(traffic.steps)

    @classmethod
    def unavailable(cls) -> str | None:
        """Why the algorithm cannot run in this installation (no torch import), or None."""
        return None

    def refuse(self, replica: Replica) -> None:
        """Raises `UserError` for a model or optimizer that the algorithm cannot train."""
        return

    def alone(self, options: Any) -> bool:
        """Whether the engine has something to do in a world of one; else training stays plain."""
        return False

    @abstractmethod
    def engine(self, replica: Replica) -> Engine:
        """What hooks into the training loop of `replica`: an engine, with moments overridden."""

    def wrap(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        options: Any,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Makes `model` and `optimizer` train as one replica of many.

        Afterwards the ordinary loop trains: `zero_grad(); loss = criterion(model(x), y);
        loss.backward(); optimizer.step()`. The returned optimizer also has `synchronize()` (nothing
        in flight, parameters current, gradients averaged), `no_sync()` and `close()` (hooks
        removed). Replicas must start equal: see `dear.broadcast_parameters`.

        Raises:
            UserError: the model or optimizer is of a kind that the algorithm cannot train, holds
                nothing to train, or is distributed already.
            Unavailable: a library that the algorithm stands on is missing.
        """
        shared = self.alone(options) or communicator.size > 1
        missing = self.unavailable() if shared else None
        if missing:
            raise Unavailable(missing)
        replica = Replica(model, optimizer, communicator, options)
        self.refuse(replica)
        options.refuse(replica.params)
        return model, distribute(optimizer, (self.engine if shared else Engine)(replica))


def _modules() -> dict[str, str]:
    """Name of each algorithm -> its module."""
    files = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.glob("*/[!_]*.py"))
    return {
        file.name.replace("_", "-"): f"dear.algorithms.{file.parent.name}.{file.name}"
        for file in files
    }


def algorithm_names() -> list[str]:
    """Every algorithm there is, by the names of the files, sorted."""
    return sorted(_modules())


def algorithm_class(name: str) -> type[Algorithm]:
    """The class in the file of algorithm `name`; raises `UserError` for an unknown name."""
    modules = _modules()
    if name not in modules:
        raise unknown("algorithm", name, sorted(modules))
    module = importlib.import_module(modules[name])
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Algorithm)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__file__} must define one Algorithm, found {len(found)}")
    return found[0]


def algorithm_options(name: str, given: dict[str, Any]) -> Options:
    """Typed options of algorithm `name`; raises `UserError` for an unknown or invalid one."""
    return build_options(algorithm_class(name).Options, given, f"option of {name}")
