"""Plan of a replayed step: nested calls of modules, and the units of the backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.models.profile import Profile

_SAME_TIME_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Part of the backward pass, with the gradients that are complete at its end."""

    backward_s: float
    params: tuple[tuple[str, int], ...] = ()
    """Name and index of each parameter; at most two, because autograd keeps the order of two."""

    @property
    def seconds(self) -> float:
        """Time of the part."""
        return self.backward_s

    @property
    def module(self) -> str:
        """Module of the first parameter; empty without parameters."""
        return self.params[0][0].rpartition(".")[0] if self.params else ""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Part of the forward pass inside one module."""

    module: str
    forward_s: float
    units: tuple[Unit, ...]
    """Units in the order of the forward pass; the gradients of the last unit come first."""

    @property
    def seconds(self) -> float:
        """Time of the part, without that of its units."""
        return self.forward_s


@dataclass(frozen=True, kw_only=True)
class Body:
    """Call of a module: its own work, and the calls of its children, in order."""

    module: str
    parts: tuple[Work | Body, ...]


@functools.lru_cache(maxsize=16)
def plan(profile: Profile) -> Body:
    """Returns the body of the root module.

    The time of a module without parameters is added to the call before it.
    """
    owners = {param.module for param in profile.parameters}
    owners |= {name.rpartition(".")[0] for name in profile.shared}
    units = _units(profile)
    works: list[Work] = []
    waiting_s = 0.0
    for position, call in enumerate(profile.calls):
        waiting_s += call.forward_s
        if call.module in owners or position in units:
            call_units = tuple(units.get(position, ()))
            works.append(Work(module=call.module, forward_s=0.0, units=call_units))
        if works:
            forward_s = works[-1].forward_s + waiting_s
            works[-1] = dataclasses.replace(works[-1], forward_s=forward_s)
            waiting_s = 0.0
    return _nest("", works)


def parts(profile: Profile) -> tuple[Work | Unit, ...]:
    """Returns the parts of a step that take time: the objects of `plan`, in their order."""
    return tuple(_flat(plan(profile)))


def _flat(body: Body) -> Iterator[Work | Unit]:
    for part in body.parts:
        if isinstance(part, Work):
            yield part
            yield from part.units
        else:
            yield from _flat(part)


def _units(profile: Profile) -> dict[int, list[Unit]]:
    """Returns the units of each call, by the call's index; units in the order of the forward pass.

    The backward pass visits the calls in reverse order. So a parameter belongs to the first call of
    its module, or to a later call if its gradient is complete before those of later modules.
    """
    first = profile.first_calls
    index = {param.name: number for number, param in enumerate(profile.parameters)}
    chain = profile.gradients()
    times = [0.0, *(param.ready_s for param in chain)]
    waits = [max(0.0, later - earlier) for earlier, later in pairwise(times)]
    units: dict[int, list[Unit]] = {}
    position = 0
    for param, wait_s in zip(reversed(chain), reversed(waits), strict=True):
        position = max(position, first[param.name])
        unit = Unit(backward_s=wait_s, params=((param.name, index[param.name]),))
        units.setdefault(position, []).append(unit)
    units = {position: _paired(group) for position, group in units.items()}
    rest_s = profile.backward_s - times[-1]
    if rest_s > _SAME_TIME_S:
        units.setdefault(min(units, default=0), []).insert(0, Unit(backward_s=rest_s))
    return units


def _paired(units: Sequence[Unit]) -> list[Unit]:
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


def _nest(module: str, works: Sequence[Work]) -> Body:
    """Merges consecutive works inside the same child of `module` into one call of that child."""
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
