"""Combinations of settings in which every two values of different axes meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

QUICK = False
"""True if this run leaves out what is marked `full`; `tests/conftest.py` sets it."""


def pairwise(
    axes: Mapping[str, Sequence[Any]], fits: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Few cases that hold every pair of values that some allowed case can hold.

    The first value of each axis is its default: `fits` is asked about cases in which axes that are
    not decided yet have theirs. The first case has nothing but defaults.
    """
    defaults = {axis: values[0] for axis, values in axes.items()}
    missing = {
        ((first, a), (other, b)): None
        for first, other in itertools.combinations(axes, 2)
        for a, b in itertools.product(axes[first], axes[other])
    }
    order = {axis: place for place, axis in enumerate(axes)}

    def new(chosen: dict[str, Any], axis: str, value: Any) -> int:
        """Returns how many missing pairs a value makes with those that are chosen already."""
        return sum(
            ((other, given), (axis, value)) in missing
            if order[other] < order[axis]
            else ((axis, value), (other, given)) in missing
            for other, given in chosen.items()
        )

    cases, case = [], defaults
    while True:
        if fits(case):
            cases.append(case)
        for pair in itertools.combinations(case.items(), 2):
            missing.pop(pair, None)
        chosen: dict[str, Any] = {}
        while missing and not chosen:
            pair = next(iter(missing))
            del missing[pair]
            if fits({**defaults, **dict(pair)}):
                chosen = dict(pair)
        if not chosen:
            return cases
        for axis in [axis for axis in axes if axis not in chosen]:
            by_use = sorted(axes[axis], key=lambda v: -new(chosen, axis, v))
            possible = (v for v in by_use if fits({**defaults, **chosen, axis: v}))
            chosen[axis] = next(possible, defaults[axis])
        case = {axis: chosen[axis] for axis in axes}


def one_in(n: int, values: Sequence[Any]) -> list[Any]:
    """Returns values for `parametrize`; marked `full` are all but the first of every n."""
    return [
        pytest.param(value, marks=pytest.mark.full) if place % n else value
        for place, value in enumerate(values)
    ]


def one_case(*values: object, label: str, full: bool) -> list[object]:
    """Returns a case for `parametrize`, or nothing if it is `full` and this run is `QUICK`.

    What pytest collects only to leave it out costs seconds.
    """
    if full and QUICK:
        return []
    return [pytest.param(*values, id=label, marks=pytest.mark.full if full else ())]


def each_value_once(cases: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Chooses few cases that hold every value of an axis that any of them holds; the first, too."""
    missing = {item for case in cases for item in case.items()}
    chosen = [False] * len(cases)
    while missing:
        best = max(range(len(cases)), key=lambda n: len(missing & cases[n].items()))
        chosen[best] = True
        missing -= cases[best].items()
    return chosen
