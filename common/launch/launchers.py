"""The launchers by name: `common/launch/NAME.py` holds the class `NameLauncher`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import common.launch
from common.launch.hosts import Host, require_slots
from common.launch.job import Launcher
from dear.errors import UserError, unknown
from dear.options import build_options


def launcher_names() -> list[str]:
    """Names of the launchers there are, found by file name."""
    modules = [module.name for module in pkgutil.iter_modules(common.launch.__path__)]
    return sorted(name for name in modules if _class_in(name) is not None)


def launcher_options(name: str, options: Mapping[str, Any]) -> Any:
    """The launcher's options from untyped values.

    Raises:
        UserError: an unknown launcher, an option that it does not have, or a bad value.
    """
    return build_options(_launcher(name).Options, options, f"option of launcher {name}")


def make_launcher(
    name: str,
    *,
    hosts: Sequence[Host] | None,
    world_size: int,
    preload: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Launcher:
    """Makes a launcher; nothing is started or asked before `check` or `run`.

    Args:
        hosts: of a hostfile or of an emulated cluster; None means this machine (slurm: whatever
            hosts it gives).
        world_size: the largest world that will be asked for.
        preload: modules to import once for all jobs, where the launcher can.
        options: what differs from the defaults of the launcher's `Options`.

    Raises:
        UserError: an unknown launcher or option, too few slots, or a launcher that cannot run here
            or on these hosts.
    """
    made = launcher_options(name, options or {})
    if hosts is not None:
        if not hosts:
            raise UserError(f"launcher {name}: the list of hosts is empty")
        require_slots(hosts, world_size, "the hosts have")
    return _launcher(name)(hosts=hosts, preload=preload, options=made)


def _launcher(name: str) -> type[Launcher]:
    if name not in launcher_names():
        raise unknown("launcher", name, launcher_names())
    found = _class_in(name)
    assert found is not None
    return found


def _class_in(name: str) -> type[Launcher] | None:
    module = importlib.import_module(f"common.launch.{name}")
    return getattr(module, f"{name.capitalize()}Launcher", None)
