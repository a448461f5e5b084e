"""Typed settings from untyped values: what is taken, and how a mistake is reported."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from common.harness.experiment_file import load
from common.harness.trial import options_of
from dear.errors import UserError, unknown
from dear.options import at_least, build_options, positive

EXPERIMENTS = Path(__file__).parents[2] / "configs/experiments"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    count: int = 1
    rate: float = 0.1
    fast: bool = False
    mode: Literal["ring", "tree"] = "ring"
    worlds: tuple[int, ...] = (2,)
    inner: Inner = field(default_factory=lambda: Inner(size=3))
    either: tuple[Inner | str, ...] = ()
    limit: float | None = 1.0
    extra: dict[str, Any] = field(default_factory=dict)


Nothing = make_dataclass("Nothing", [], frozen=True, kw_only=True)


def build(**given):
    return build_options(Outer, {"name": "x", **given}, "demo option")


@pytest.mark.parametrize(
    ("key", "given", "taken"),
    [
        ("rate", "1e-3", 1e-3),  # as text: YAML reads such numbers so
        ("rate", "5E4", 5e4),
        ("rate", "-2", -2.0),
        ("rate", 2, 2.0),
        ("mode", "tree", "tree"),
        ("worlds", [1, 2], (1, 2)),
        ("worlds", [], ()),
        ("worlds", 4, (4,)),
        ("inner", {"size": 2}, Inner(size=2)),
        ("either", [{"size": 1}, "text"], (Inner(size=1), "text")),
        ("limit", None, None),
        ("limit", 2, 2.0),
        ("extra", {"a": 1}, {"a": 1}),
    ],
)
def test_what_is_taken_and_that_the_rest_keeps_its_defaults(key, given, taken):
    built = build(**{key: given})
    assert built == replace(Outer(name="x"), **{key: taken})
    assert type(getattr(built, key)) is type(taken)
    assert getattr(built, key) is not given or not isinstance(given, dict)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *((key, value, "must be a text") for key, value in (("name", 3), ("name", None))),
        *(("count", value, "must be a whole number") for value in (1.0, "1", True)),
        *(("rate", value, "must be a number") for value in (True, "fast", None)),
        *(("fast", value, "must be true or false") for value in (1, "yes")),
        *((key, value, "must be a mapping") for key, value in (("inner", 3), ("extra", [1]))),
        ("limit", "none", "must be a number"),
    ],
)
def test_wrong_type_names_key_wish_and_value(key, value, words):
    words = rf"^demo option '{key}': {words}[^\n]*got {re.escape(repr(value))}\Z"
    with pytest.raises(UserError, match=words):
        build(**{key: value})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cuont": 2}, ["demo option 'cuont'", "did you mean 'count'?", "worlds"]),
        ({"mode": "trea"}, ["demo option 'mode': unknown value 'trea'", "did you mean 'tree'?"]),
        ({"worlds": [1, "b"]}, ["demo option 'worlds.1': must be a whole number, got 'b'"]),
        ({"worlds": None}, ["got None"]),
        ({"inner": {"size": "big"}}, ["demo option 'inner.size': must be"]),
        ({"inner": {"size": 2, "shaer": 1}}, ["'inner': unknown key 'shaer'", "'share'?"]),
        ({"inner": {}}, ["demo option 'inner.size' is missing"]),
        ({"either": [{"sise": 1}]}, ["did you mean 'size'?"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(given, words):
    with pytest.raises(UserError) as caught:
        build(**given)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_what_is_missing_or_far_from_all_names():
    with pytest.raises(UserError, match="demo option 'name' is missing"):
        build_options(Outer, {}, "demo option")
    with pytest.raises(UserError, match="demo option 'x': there are none"):
        build_options(Nothing, {"x": 1}, "demo option")
    with pytest.raises(UserError) as caught:
        build(zzzzzz=2)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_refuse_what_is_below_and_nan(value):
    at_least("repeats", 1, 1)
    with pytest.raises(UserError, match=rf"^lr must be greater than 0.*got {value}$"):
        positive("lr", value)
    with pytest.raises(UserError, match=rf"^repeats must be at least 1.*got {value}$"):
        at_least("repeats", value, 1)


def test_times_among_options_are_those_of_the_cluster_that_is_emulated(monkeypatch):
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    slowed = options_of("dear", {"fusion": "wait_time", "cycle_time_ms": 2.0}).slowed(8)
    assert (slowed.cycle_time_ms, slowed.threshold_mb) == (16.0, 25.0)
    assert options_of("dear", {}).slowed(8).fusion == "threshold"
    assert options_of("dadt", {}).slowed(8).cycle_time_ms is None

    def cycle_ms(factor, **given):
        return options_of("horovod", given).slowed(factor).cycle_time_ms

    assert cycle_ms(8, cycle_time_ms=2.5) == 20.0
    assert cycle_ms(8) == 8.0, "Horovod's own default"
    assert cycle_ms(1) is None
    assert cycle_ms(8, autotune=True) is None
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3")
    assert cycle_ms(8) == 24.0


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_options_of_an_emulated_cluster_may_still_be_changed(path):
    # As a tuner does, in the midst of a trial.
    for choice in load(path).algorithms:
        slowed = options_of(choice.name, choice.options).slowed(8)
        assert replace(slowed) == slowed, choice.title


@pytest.mark.parametrize(("count", "listed"), [(24, True), (25, False)])
def test_so_many_names_are_listed_and_more_are_counted(count, listed):
    names = [f"name{number}" for number in range(count)]
    text = str(unknown("thing", "else", names))
    assert ("name0, name1" in text) is listed
    assert (f"{count} names, see `list`" in text) is not listed
