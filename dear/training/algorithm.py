"""Base class of the data-parallel training algorithms, and how the file of an algorithm is found.

An algorithm is one file in a folder of `dear/algorithms/`. The folder says what is promised about
the replicas. The file name (with dashes for underscores) is the algorithm's name on the command
line, in records and in plots. The file defines one subclass of `Algorithm` and takes torch from
`dear.lazy`, so that listing and checking never import torch. Files whose names begin with an
underscore are no algorithms. `load_plugin` adds a file from elsewhere.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from inspect import getattr_static
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, ClassVar, Generic, Literal, get_args

from dear.buckets.grouping import Arrived, Cost, Groups
from dear.comm.communicator import Communicator
from dear.cost.bounds import Bound, Traffic
from dear.cost.overlap import Overlap, Unstated
from dear.errors import Unavailable, UserError, unknown
from dear.lazy import torch
from dear.options import Options, OptionsT, build_options
from dear.training.engine import AnyEngine, Distributed, Engine, Replica, distribute
from dear.training.files import digest_of, module_of

FOLDER = Path(__file__).parents[1] / "algorithms"
Consistency = Literal["synchronous", "delayed", "decentralized", "asynchronous"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Promises and needs of an algorithm; the harness checks them before a launch."""

    consistency: Consistency
    """`synchronous`: after each step all replicas equal serial training on the joined batch."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    min_world_size: int = 1


class Algorithm(ABC, Generic[OptionsT]):
    """Base of the algorithms; a subclass names its options, as `Algorithm["Mine.Options"]`."""

    Options: ClassVar[type[Options]] = Options
    capabilities: ClassVar[Capabilities]
    bound: ClassVar[Bound | None] = None
    """Formula of `dear.cost.bounds` for the shortest step; None: no formula is known."""
    overlap: ClassVar[Overlap | Unstated | None] = None
    """Start of each transfer, and what waits for it (`dear.cost.overlap`); None fails the tests."""
    candidates: ClassVar[tuple[Mapping[str, object], ...] | None] = ()
    """Options that a search for the fastest settings tries besides the defaults; None: it does not
    try the algorithm, which chooses among others itself."""
    unfused: ClassVar[Mapping[str, object] | None] = None
    """Options with which every gradient travels alone; None: nothing travels together anyway."""

    @classmethod
    def bound_of(cls, options: OptionsT) -> Bound | None:
        """Returns `bound` for these options."""
        return cls.bound

    @classmethod
    def overlap_of(cls, options: OptionsT) -> Overlap | Unstated | None:
        """Returns `overlap` for these options."""
        return cls.overlap

    @classmethod
    def is_exact(cls, options: OptionsT) -> bool:
        """Returns True if training has the result of a single worker with the joined batch."""
        synchronous = cls.capabilities.consistency == "synchronous"
        return synchronous and getattr(options, "compression", "none") == "none"

    @classmethod
    def sends_by(cls, options: OptionsT) -> str | None:
        """Returns the name of the library that all-reduces the gradients in place of the
        communicator (`dear.cost.foreign.Sender.name`), or None."""
        return None

    @classmethod
    def costs_as(cls, options: OptionsT) -> str | None:
        """Returns the engine of predictions whose messages cost the same as those of the library of
        `sends_by`; None: unknown, so predictions refuse the algorithm, other than over NCCL."""
        return None

    @classmethod
    def grouping(cls, options: OptionsT, arrived: Arrived, cost: Cost) -> Groups | None:
        """Returns the groups of gradients that travel together once the algorithm has tuned itself.

        Groups are in the order in which they start. Each gradient is given by its index in the
        order of arrival. None: unknown before a run.

        Args:
            cost: seconds of an all-reduce by its bytes.
        """
        return None

    @classmethod
    def traffic(cls, options: OptionsT, world_size: int, local_size: int) -> Traffic | None:
        """Returns what ranks exchange with some of the other ranks.

        None: all ranks take part in the same collectives.

        Args:
            local_size: ranks per host.

        Raises:
            UserError: the algorithm cannot run in such a world.
        """
        return None

    @classmethod
    def period(cls, options: OptionsT, world_size: int, local_size: int) -> int:
        """Returns the number of steps after which a rank's exchanges repeat.

        A mean over steps needs whole periods. Arguments and errors are those of `traffic`.
        """
        traffic = cls.traffic(options, world_size, local_size)
        return 1 if traffic is None else len(traffic.steps)

    @classmethod
    def unavailable(cls) -> str | None:
        """Returns the reason why the algorithm cannot run in this installation, or None.

        It must not import torch.
        """
        return None

    def _refuse(self, replica: Replica[OptionsT]) -> None:
        self.refuse(replica)
        groups = replica.optimizer.param_groups if replica.has_optimizer else []
        replica.options.refuse(replica.params, groups)

    def refuse(self, replica: Replica[OptionsT]) -> None:
        """Raises `UserError` if the algorithm cannot train the model or the optimizer."""
        return

    def alone(self, options: OptionsT) -> bool:
        """Returns True if even a world of one needs the engine, as it is not plain training."""
        return options.alone

    @abstractmethod
    def engine(self, replica: Replica[OptionsT]) -> AnyEngine:
        """Returns the engine that acts in the training loop of `replica`."""

    def wrap(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        options: OptionsT,
    ) -> tuple[torch.nn.Module, Distributed]:
        """Makes `model` and `optimizer` train as one replica of many.

        Afterwards the ordinary loop trains: `zero_grad(); loss = criterion(model(x), y);
        loss.backward(); optimizer.step()`. The returned optimizer has three more methods:
        `synchronize()` completes all transfers and updates, `no_sync()` accumulates gradients, and
        `close()` removes the algorithm. Replicas must start equal: see `dear.broadcast_parameters`.

        Raises:
            UserError: the algorithm cannot train this kind of model or optimizer, there is nothing
                to train, or the optimizer is already distributed.
            Unavailable: a library that the algorithm needs is missing.
        """
        shared = self.alone(options) or communicator.size > 1
        missing = self.unavailable() if shared else None
        if missing:
            raise Unavailable(missing)
        replica = Replica(model, optimizer, communicator, options, self._refuse)
        return model, distribute(optimizer, self.engine(replica) if shared else Engine(replica))


_PLUGINS = "dear_plugins"
"""Package name for the modules of plugins; no folder belongs to it."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """File of an algorithm outside `dear.algorithms`."""

    path: str
    """Absolute path; the same on every host."""
    digest: str
    """Digest of the file and of the files in its folder that it imports (`dear.training.files`)."""


_plugins: dict[str, Plugin] = {}


def load_plugin(path: Path, digest: str | None = None) -> str:
    """Registers the file's algorithm in this process and returns its name.

    The name is the file's name with dashes, as in dear. A second call does nothing.

    Args:
        digest: expected digest; None: any.

    Raises:
        UserError: the file cannot be read or imported, defines no or several algorithms, has the
            name of another algorithm, or has another digest.
    """
    path = path.resolve()
    plugin = Plugin(path=str(path), digest=digest_of(path))
    name = path.stem.replace("_", "-")
    if digest not in (None, plugin.digest):
        raise UserError(f"{path}: has changed since the sweep began; start the sweep again")
    if _plugins.get(name) == plugin:
        return name
    if re.fullmatch("[a-z][a-z0-9-]*", name) is None or path.suffix != ".py":
        raise UserError(
            f"{path}: the file's name is the algorithm's name; it may have small letters, digits "
            "and underscores, and must end in .py; rename the file"
        )
    if name in _modules():
        whose = f"of {_plugins[name].path}" if name in _plugins else "of dear's own"
        raise UserError(f"{path}: there is an algorithm {name!r} {whose}; rename the file")
    module = module_of(path, _PLUGINS)
    kinds = _defined_in(module)
    if len(kinds) != 1:
        names = ", ".join(kind.__name__ for kind in kinds) or "none"
        raise UserError(
            f"{path}: must define one subclass of dear.training.algorithm.Algorithm, found {names}"
        )
    capabilities = getattr(kinds[0], "capabilities", None)
    consistency = getattr(capabilities, "consistency", None)
    if consistency not in get_args(Consistency):
        raise UserError(
            f"{path}: {kinds[0].__name__} must say what it promises about replicas, e.g. "
            'capabilities = Capabilities(consistency="synchronous")'
        )
    _check_form(path, kinds[0])
    alike = consistency in ("synchronous", "delayed")
    if not alike and getattr_static(kinds[0], "traffic") is getattr_static(Algorithm, "traffic"):
        raise UserError(
            f"{path}: {kinds[0].__name__} must define traffic() (who sends to whom): replicas are "
            f"{consistency}, so its ranks do not take part in the same collectives"
        )
    _plugins[name] = plugin
    return name


def _check_form(path: Path, kind: type[Algorithm[Any]]) -> None:
    """Raises `UserError` if `Options`, or a method of the class, has another form."""
    if not (isinstance(kind.Options, type) and issubclass(kind.Options, Options)):
        raise UserError(f"{path}: {kind.__name__}.Options must extend dear.options.Options")
    for name, value in vars(Algorithm).items():
        if isinstance(value, classmethod) and not isinstance(
            getattr_static(kind, name), classmethod | staticmethod | MethodType
        ):
            raise UserError(f"{path}: {kind.__name__}.{name} must be a class method (@classmethod)")


def plugin_of(name: str) -> Plugin | None:
    """Returns the plugin of algorithm `name`, or None if it is in `dear.algorithms`."""
    return _plugins.get(name)


def _modules() -> dict[str, str]:
    plugins = {name: f"{_PLUGINS}.{Path(file.path).stem}" for name, file in _plugins.items()}
    return _shipped(FOLDER) | plugins


@cache
def _shipped(folder: Path) -> dict[str, str]:
    return {
        file.stem.replace("_", "-"): f"dear.algorithms.{file.parent.name}.{file.stem}"
        for file in folder.glob("*/[!_]*.py")
    }


def algorithm_names() -> list[str]:
    """Returns the names of all algorithms, sorted."""
    return sorted(_modules())


def algorithm_class(name: str) -> type[Algorithm[Any]]:
    """Returns the class in the file of algorithm `name`; raises `UserError` for an unknown name."""
    modules = _modules()
    if name not in modules:
        raise unknown("algorithm", name, sorted(modules))
    module = importlib.import_module(modules[name])
    kinds = _defined_in(module)
    if len(kinds) != 1:
        raise TypeError(f"{module.__file__} must define one Algorithm, found {len(kinds)}")
    return kinds[0]


def _defined_in(module: ModuleType) -> list[type[Algorithm[Any]]]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Algorithm)
        and value.__module__ == module.__name__
    ]


def algorithm_options(name: str, given: Mapping[str, object]) -> Options:
    """Returns the typed options of algorithm `name`.

    Raises:
        UserError: an option is unknown or invalid.
    """
    return build_options(algorithm_class(name).Options, given, f"{name} option")
