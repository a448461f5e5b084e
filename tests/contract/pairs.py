"""Combinations of settings in which every two values of different axes meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def pairwise(
    axes: Mapping[str, Sequence[Any]], fits: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Few cases that hold every pair of values that some allowed case can hold.

    The first value of each axis is its default: `fits` is asked about cases in which axes that are
    not decided yet have theirs. The first case has nothing but defaults.
    """
    defaults = {name: values[0] for name, values in axes.items()}
    places = [(name, i) for name, values in axes.items() for i in range(len(values))]
    missing = dict.fromkeys((a, b) for a, b in itertools.combinations(places, 2) if a[0] != b[0])
    cases = []

    def value(place: tuple[str, int]) -> dict[str, Any]:
        return {place[0]: axes[place[0]][place[1]]}

    def extended(chosen: dict[str, int]) -> dict[str, int]:
        for name, values in axes.items():
            if name in chosen:
                continue
            given = {n: axes[n][i] for n, i in chosen.items()}
            possible = [
                i for i in range(len(values)) if fits({**defaults, **given, name: values[i]})
            ]
            chosen[name] = max(possible, key=lambda i: _new(missing, chosen, (name, i)), default=0)
        return chosen

    chosen = dict.fromkeys(axes, 0)
    while True:
        case = {name: axes[name][i] for name, i in chosen.items()}
        if fits(case):
            cases.append(case)
        for pair in itertools.combinations(places, 2):
            if all(chosen[name] == i for name, i in pair):
                missing.pop(pair, None)
        while missing:
            a, b = next(iter(missing))
            del missing[a, b]
            if fits({**defaults, **value(a), **value(b)}):
                break
        else:
            return cases
        chosen = extended(dict([a, b]))


def _new(missing: Mapping[Any, Any], chosen: dict[str, int], place: tuple[str, int]) -> int:
    others = list(chosen.items())
    return sum((other, place) in missing or (place, other) in missing for other in others)
