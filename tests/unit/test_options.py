"""Typed settings from untyped values: what is taken, and how a mistake is reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from dear.errors import UserError
from dear.options import at_least, build_options, positive


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


@dataclass(frozen=True, kw_only=True)
class Nothing:
    pass


def build(**given):
    return build_options(Outer, {"name": "x", **given}, "option of demo")


def message(**given):
    with pytest.raises(UserError) as caught:
        build(**given)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_missing_keys_keep_their_defaults():
    assert build() == Outer(name="x")


def test_unknown_key_is_named_with_a_suggestion():
    text = message(cuont=2)
    assert "option of demo 'cuont'" in text
    assert "did you mean 'count'?" in text
    assert "worlds" in text  # the allowed ones are listed


def test_unknown_key_far_from_all_others_gets_no_suggestion():
    assert "did you mean" not in message(zzzzzz=2)


def test_a_class_without_options_says_so():
    with pytest.raises(UserError, match="option of demo 'x': it has none"):
        build_options(Nothing, {"x": 1}, "option of demo")


def test_missing_key_is_named():
    with pytest.raises(UserError, match="option of demo: 'name' is missing"):
        build_options(Outer, {}, "option of demo")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("name", 3, "a text"),
        ("name", None, "a text"),
        ("count", 1.0, "a whole number"),
        ("count", "1", "a whole number"),
        ("count", True, "a whole number"),
        ("rate", True, "a number"),
        ("rate", "fast", "a number"),
        ("rate", None, "a number"),
        ("fast", 1, "true or false"),
        ("fast", "yes", "true or false"),
        ("inner", 3, "a mapping"),
        ("extra", [1], "a mapping"),
        ("limit", "none", "a number"),
    ],
)
def test_wrong_type_names_key_wish_and_value(key, value, wanted):
    text = message(**{key: value})
    assert f"option of demo '{key}': must be {wanted}" in text
    assert text.endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("text", "number"), [("1e-3", 1e-3), ("5E4", 5e4), ("-2", -2.0), ("1e-05", 1e-5)]
)
def test_numbers_that_yaml_reads_as_text_are_numbers(text, number):
    assert build(rate=text).rate == number


def test_whole_number_becomes_float_where_a_float_is_wanted():
    rate = build(rate=2).rate
    assert rate == 2.0
    assert isinstance(rate, float)


def test_literal_takes_its_choices_only():
    assert build(mode="tree").mode == "tree"
    text = message(mode="trea")
    assert "option of demo 'mode' 'trea'" in text
    assert "did you mean 'tree'?" in text


def test_lists_become_tuples_and_a_single_value_a_tuple_of_one():
    assert build(worlds=[1, 2]).worlds == (1, 2)
    assert build(worlds=[]).worlds == ()
    assert build(worlds=4).worlds == (4,)


def test_each_item_of_a_tuple_is_checked():
    assert "option of demo 'worlds': must be a whole number, got 'b'" in message(worlds=[1, "b"])
    assert "got None" in message(worlds=None)


def test_nested_dataclass_is_built_and_its_errors_name_both_keys():
    assert build(inner={"size": 2}).inner == Inner(size=2)
    assert "option of demo 'inner' 'size'" in message(inner={"size": "big"})
    text = message(inner={"size": 2, "shaer": 1})
    assert "option of demo 'inner' 'shaer'" in text
    assert "did you mean 'share'?" in text
    assert "option of demo 'inner': 'size' is missing" in message(inner={})


def test_union_takes_each_of_its_kinds():
    assert build(either=[{"size": 1}, "text"]).either == (Inner(size=1), "text")
    assert build(limit=None).limit is None
    assert build(limit=2).limit == 2.0


def test_union_reports_what_is_wrong_inside_a_mapping():
    assert "did you mean 'size'?" in message(either=[{"sise": 1}])


def test_dict_is_copied():
    given = {"a": 1}
    built = build(extra=given)
    given["a"] = 2
    assert built.extra == {"a": 1}


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_positive_refuses_zero_negative_and_nan(value):
    with pytest.raises(UserError, match=rf"^lr must be greater than 0.*got {value}$"):
        positive("lr", value)


@pytest.mark.parametrize("value", [0, float("nan")])
def test_at_least_refuses_less_and_nan(value):
    at_least("repeats", 1, 1)
    with pytest.raises(UserError, match=rf"^repeats must be at least 1.*got {value}$"):
        at_least("repeats", value, 1)
