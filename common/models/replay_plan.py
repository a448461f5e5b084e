"""From a profile to what each module of a replayed model does when it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.profiling.profile import Profile

_SAME_TIME_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A stretch of the backward pass, with the gradients that are complete at its end."""

    backward_s: float
    params: tuple[tuple[str, int], ...] = ()
    """At most two names and places in the model's order: of two, autograd keeps the order."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A stretch of the forward pass inside one module."""

    module: str
    forward_s: float
    units: tuple[Unit, ...]
    """In the order of the forward pass: the last one's gradients come first."""


@dataclass(frozen=True, kw_only=True)
class Body:
    """What a module does in one call: work of its own and calls of children, in order."""

    module: str
    parts: tuple[Work | Body, ...]


def plan(profile: Profile) -> Body:
    """The root's body. Modules without parameters lend their time to the call before them."""
    owners = {param.module for param in profile.parameters}
    owners |= {name.rpartition(".")[0] for name in profile.shared}
    units = _units(profile)
    works: list[Work] = []
    waiting_s = 0.0
    for position, call in enumerate(profile.calls):
        waiting_s += call.forward_s
        if call.module in owners or position in units:
            here = tuple(units.get(position, ()))
            works.append(Work(module=call.module, forward_s=0.0, units=here))
        if works:
            forward_s = works[-1].forward_s + waiting_s
            works[-1] = dataclasses.replace(works[-1], forward_s=forward_s)
            waiting_s = 0.0
    return _nest("", works)


def _units(profile: Profile) -> dict[int, list[Unit]]:
    """Units by the position of the call they belong to, in the order of the forward pass.

    Autograd goes backward through the calls. So a parameter belongs to a call of its module, or to
    a later one if its gradient comes earlier than those of modules that run later.
    """
    first = _first_calls(profile)
    place = {param.name: index for index, param in enumerate(profile.parameters)}
    chain = profile.gradients()
    times = [0.0, *(param.ready_s for param in chain)]
    waits = [max(0.0, later - earlier) for earlier, later in pairwise(times)]
    found: dict[int, list[Unit]] = {}
    position = 0
    for param, wait_s in zip(reversed(chain), reversed(waits), strict=True):
        position = max(position, first[param.name])
        unit = Unit(backward_s=wait_s, params=((param.name, place[param.name]),))
        found.setdefault(position, []).append(unit)
    found = {position: _paired(units) for position, units in found.items()}
    rest_s = profile.backward_s - times[-1]
    if rest_s > _SAME_TIME_S:
        found.setdefault(min(found, default=0), []).insert(0, Unit(backward_s=rest_s))
    return found


def _paired(units: Sequence[Unit]) -> list[Unit]:
    """Lets two parameters whose gradients come together share a unit."""
    result: list[Unit] = []
    for unit in units:
        later = result[-1] if result else None  # in the backward pass
        if later and len(later.params) == 1 and later.backward_s < _SAME_TIME_S:
            result[-1] = Unit(
                backward_s=unit.backward_s + later.backward_s, params=unit.params + later.params
            )
        else:
            result.append(unit)
    return result


def _first_calls(profile: Profile) -> dict[str, int]:
    """By parameter the position of the first call of a module that owns it."""
    calls: dict[str, int] = {}
    for position, call in enumerate(profile.calls):
        calls.setdefault(call.module, position)
    names = {param.name: [param.name] for param in profile.parameters}
    for alias, name in profile.shared.items():
        names[name].append(alias)
    return {
        name: min(_call_of(alias.rpartition(".")[0], calls) for alias in aliases)
        for name, aliases in names.items()
    }


def _call_of(module: str, calls: dict[str, int]) -> int:
    # The parameters of a module that is never called are read by the one around it.
    while module not in calls and module:
        module = module.rpartition(".")[0]
    return calls.get(module, 0)


def _nest(module: str, works: Sequence[Work]) -> Body:
    """Makes neighbours inside the same child of `module` one call of that child."""
    parts: list[Work | Body] = []
    prefix = f"{module}." if module else ""
    start = 0
    while start < len(works):
        if works[start].module == module:
            parts.append(works[start])
            start += 1
            continue
        child = prefix + works[start].module[len(prefix) :].partition(".")[0]
        end = start
        while end < len(works) and f"{works[end].module}.".startswith(f"{child}."):
            end += 1
        parts.append(_nest(child, works[start:end]))
        start = end
    return Body(module=module, parts=tuple(parts))
