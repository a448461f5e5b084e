"""Frozen dataclasses from untyped values (YAML, command line, keyword arguments), strictly."""

from __future__ import annotations

import copy
import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dear.errors import UserError, unknown

T = TypeVar("T")
Own = TypeVar("Own", bound="Options")
_LATER = "later"
LATER = {_LATER: True}
"""Metadata of a field that came when there were records already: it is left out of what identifies
them where it has its default."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one algorithm: a frozen dataclass, every field documented with its unit."""

    def settling_steps(self) -> int:
        """Steps in which the algorithm still measures or changes itself: none of them is typical.

        A benchmark leaves them out.
        """
        return 0

    def staleness(self) -> int:
        """How many steps an update comes after the gradients that it applies.

        For `delayed` algorithms: so many first steps update nothing.
        """
        return 0

    def in_step(self) -> bool:
        """Whether an `asynchronous` algorithm is told to wait for all ranks in each step.

        Then ranks must make the same number of steps.
        """
        return False

    def slowed(self: Own, factor: float) -> Own:
        """The same for a job in which all else takes `factor` times as long: an emulated cluster.

        What is a time, by the end of its name, is as much longer.
        """
        made = copy.copy(self)  # what may be given with what has been looked at already
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_ms") and value is not None:
                object.__setattr__(made, field.name, value * factor)
        return made

    def refuse(self, params: Sequence[Any]) -> None:
        """Raises `UserError` if one of the trained `params` cannot be had with these settings."""


def said(options: Any) -> dict[str, Any]:
    """The fields of options and their values, but `LATER` ones that have their defaults."""
    plain = type(options)()
    left_out = {
        field.name
        for field in dataclasses.fields(options)
        if _LATER in field.metadata and getattr(options, field.name) == getattr(plain, field.name)
    }
    return {key: v for key, v in dataclasses.asdict(options).items() if key not in left_out}


def build_options(cls: type[T], given: Mapping[str, Any], what: str) -> T:
    """Makes a `cls` from `given`; every key must be a field and every value of the field's type.

    Args:
        cls: a dataclass whose fields are bool, int, float, str, Literal, tuples, dicts, dataclasses
            or unions of these. Its `__post_init__` may raise `UserError` for a bad value.
        what: how messages call a key, e.g. `option of dear`.

    Raises:
        UserError: an unknown key, a missing one, or a value of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            if not fields:
                raise UserError(f"unknown {what} {key!r}: it has none")
            raise unknown(what, key, fields)
        values[key] = _convert(value, hints[key], f"{what} {key!r}")
    for name, field in fields.items():
        missing = field.default is field.default_factory is dataclasses.MISSING
        if missing and name not in values:
            raise UserError(f"{what}: {name!r} is missing")
    return cls(**values)


def option_of(options: Any, field: str) -> str:
    """How messages call a field of an algorithm's `options`, e.g. `option of dear 'density'`."""
    # The name of an algorithm is that of its file.
    name = type(options).__module__.rpartition(".")[2].replace("_", "-")
    return f"option of {name} {field!r}"


def only_with(options: Any, field: str, other: str, values: Sequence[str]) -> None:
    """Raises `UserError` if `field` is not its default and `other` not one of `values`.

    For fields that mean something with some values of another one only: to accept them otherwise
    would be to ignore them.
    """
    default = next(f.default for f in dataclasses.fields(options) if f.name == field)
    if getattr(options, field) != default and getattr(options, other) not in values:
        *first, last = values
        wanted = f"{', '.join(first)} or {last}" if first else last
        raise UserError(
            f"{option_of(options, field)} goes with {other}={wanted}, got "
            f"{other}={getattr(options, other)!r}"
        )


def _convert(value: Any, hint: Any, what: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), what)
    if origin is Literal:
        if value not in get_args(hint):
            raise unknown(what, value, [str(choice) for choice in get_args(hint)])
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            value = [value]
        return tuple(_convert(item, get_args(hint)[0], what) for item in value)
    if hint is Any:
        return value
    mapping = origin is dict or hint is dict
    if mapping or dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _mismatch(what, value, "a mapping of names to values")
        return dict(value) if mapping else build_options(hint, value, f"key of {what}")
    return _convert_scalar(value, hint, what)


def _convert_union(value: Any, hints: tuple[Any, ...], what: str) -> Any:
    if value is None and type(None) in hints:
        return None
    errors = []
    for hint in hints:
        if hint is type(None):
            continue
        try:
            return _convert(value, hint, what)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _convert_scalar(value: Any, hint: Any, what: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 1e-3 (no dot) as text.
        try:
            return float(value)
        except ValueError:
            raise _mismatch(what, value, "a number") from None
    right = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    if not right:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise _mismatch(what, value, names[hint])
    return value


def _mismatch(what: str, value: Any, wanted: str) -> UserError:
    return UserError(f"{what}: must be {wanted}, got {value!r}")


def at_least(name: str, value: float | None, least: float) -> None:
    """Raises `UserError` unless `value` is None, or `>= least` and finite; for `__post_init__`."""
    if value is not None and not least <= value < math.inf:
        raise UserError(f"{name} must be at least {least:g}, got {value}")


def positive(name: str, value: float | None) -> None:
    """Raises `UserError` unless `value` is None, or `> 0` and finite; for `__post_init__`."""
    if value is not None and not 0 < value < math.inf:
        raise UserError(f"{name} must be greater than 0 and finite, got {value}")
