"""The contract of a data-parallel training algorithm, and how its file is found.

An algorithm is one file in a folder of `dear/algorithms/`. The folder says what is promised about
the replicas; the file name (with dashes for underscores) is the algorithm's name on the command
line, in records and in plots. The file defines one subclass of `Algorithm` and takes torch from
`dear.lazy`, so that listing and checking never import torch. Files whose names begin with an
underscore are no algorithms. A file from elsewhere counts as one after `load_plugin`.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, get_args

from dear.buckets.grouping import Arrived, Cost, Groups
from dear.comm.communicator import Communicator
from dear.cost.bounds import Bound, Traffic
from dear.cost.overlap import Overlap, Unstated
from dear.errors import Unavailable, UserError, unknown
from dear.files import digest_of, module_of
from dear.lazy import torch
from dear.options import Options, build_options
from dear.training.engine import Engine, Replica, distribute

FOLDER = Path(__file__).parents[1] / "algorithms"
Consistency = Literal["synchronous", "delayed", "decentralized", "asynchronous"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Promises and needs of an algorithm; the harness checks them before a launch."""

    consistency: Consistency
    """`synchronous`: after each step all replicas equal serial training on the joined batch."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    min_world_size: int = 1


class Algorithm(ABC):
    """Consistency of the replicas."""

    Options: ClassVar[type[Options]] = Options
    capabilities: ClassVar[Capabilities]
    bound: ClassVar[Bound | None] = None
    """Which formula of `dear.cost.bounds` says how short a step can be; None: none is known."""
    overlap: ClassVar[Overlap | Unstated | None] = None
    """Statement of order (`dear.cost.overlap`). The tests refuse None."""

    @classmethod
    def bound_of(cls, options: Any) -> Bound | None:
        """The formula with these options."""
        return cls.bound

    @classmethod
    def overlap_of(cls, options: Any) -> Overlap | Unstated | None:
        """The statement with these options."""
        return cls.overlap

    @classmethod
    def sends_by(cls, options: Any) -> str | None:
        """Name of the engine, if a library sends all gradients by an engine of its own, with
        all-reduces (`dear.cost.foreign.Sender.name`). None: the communicator sends."""
        return None

    @classmethod
    def grouping(cls, options: Any, arrived: Arrived, cost: Cost) -> Groups | None:
        """Which gradients travel together once it has settled, in the order in which they start.

        By their places in the order of arrival. None: nobody knows without running it.

        Args:
            options: of this algorithm.
            cost: seconds of an all-reduce by its bytes.
        """
        return None

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


_PLUGINS = "dear_plugins"
"""The package that files from elsewhere seem to be in."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """The file of an algorithm that is none of dear's own."""

    path: str
    """Absolute; on every host the same."""
    digest: str
    """Digest of the file and of the files beside it that it imports (`dear.files`)."""


_plugins: dict[str, Plugin] = {}


def load_plugin(path: Path, digest: str | None = None) -> str:
    """Makes the file's algorithm one of those there are, in this process; its name.

    The name is that of the file, as with dear's own. A file that is loaded already stays as it was.

    Args:
        digest: what it must be; None: whatever it is.

    Raises:
        UserError: the file cannot be read or imported, defines no algorithm or several, has the
            name of another one, or is not what it was.
    """
    path = path.resolve()
    found = Plugin(path=str(path), digest=digest_of(path))
    name = path.stem.replace("_", "-")
    if digest not in (None, found.digest):
        raise UserError(f"{path}: not what it was when the sweep began; start it again")
    if _plugins.get(name) == found:
        return name
    if re.fullmatch("[a-z][a-z0-9-]*", name) is None or path.suffix != ".py":
        raise UserError(
            f"{path}: the file's name is the algorithm's, in small letters, digits and "
            "underscores, and ends in .py; rename it"
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
    if getattr(capabilities, "consistency", None) not in get_args(Consistency):
        raise UserError(
            f"{path}: {kinds[0].__name__} must say what replicas promise, e.g. "
            'capabilities = Capabilities(consistency="synchronous")'
        )
    alike = capabilities.consistency in ("synchronous", "delayed")
    if not alike and kinds[0].traffic.__func__ is Algorithm.traffic.__func__:
        raise UserError(
            f"{path}: {kinds[0].__name__}.traffic must say who sends to whom, for replicas are "
            f"{capabilities.consistency}: only who averages alike takes part in the same "
            "collectives"
        )
    _plugins[name] = found
    return name


def plugin_of(name: str) -> Plugin | None:
    """The file of algorithm `name`; None: it is dear's own."""
    return _plugins.get(name)


def _modules() -> dict[str, str]:
    """Name of each algorithm -> its module."""
    files = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.glob("*/[!_]*.py"))
    own = {
        file.name.replace("_", "-"): f"dear.algorithms.{file.parent.name}.{file.name}"
        for file in files
    }
    return own | {name: f"{_PLUGINS}.{Path(one.path).stem}" for name, one in _plugins.items()}


def algorithm_names() -> list[str]:
    """Every algorithm there is, by the names of the files, sorted."""
    return sorted(_modules())


def algorithm_class(name: str) -> type[Algorithm]:
    """The class in the file of algorithm `name`; raises `UserError` for an unknown name."""
    modules = _modules()
    if name not in modules:
        raise unknown("algorithm", name, sorted(modules))
    module = importlib.import_module(modules[name])
    found = _defined_in(module)
    if len(found) != 1:
        raise TypeError(f"{module.__file__} must define one Algorithm, found {len(found)}")
    return found[0]


def _defined_in(module: ModuleType) -> list[type[Algorithm]]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Algorithm)
        and value.__module__ == module.__name__
    ]


def algorithm_options(name: str, given: dict[str, Any]) -> Options:
    """Typed options of algorithm `name`; raises `UserError` for an unknown or invalid one."""
    return build_options(algorithm_class(name).Options, given, f"option of {name}")
