"""Strict conversion of untyped values (YAML, command line, keyword arguments) to dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from dear.errors import UserError, unknown
from dear.lazy import torch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
OptionsT = TypeVar("OptionsT", bound="Options")
MOST_LIBRARY_MB = 1 << 40
"""Largest size in MB for libraries that keep the bytes in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of an algorithm's settings: a frozen dataclass whose fields state their units."""

    def settling_steps(self) -> int:
        """Returns the number of first steps in which the algorithm still measures or adapts itself.

        Their duration is not typical, so a benchmark leaves them out.
        """
        return 0

    def staleness(self) -> int:
        """Returns the number of steps between a gradient and the update that applies it.

        So many first steps of a `delayed` algorithm update nothing.
        """
        return 0

    def in_step(self) -> bool:
        """Returns True if these settings make an `asynchronous` algorithm wait in each step.

        All ranks must then make the same number of steps.
        """
        return False

    def slowed(self: OptionsT, factor: float) -> OptionsT:
        """Returns a copy for an emulated cluster that runs `factor` times slower than real time.

        Every time, i.e. every field whose name ends in `_ms`, is multiplied by `factor`.
        """
        scaled = copy.copy(self)  # `replace` would repeat the checks of `__post_init__`
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_ms") and value is not None:
                object.__setattr__(scaled, field.name, value * factor)
        return scaled

    @property
    def alone(self) -> bool:
        """True if a world of one differs from plain training."""
        return False

    @property
    def no_scaler(self) -> str | None:
        """Reason why a GradScaler cannot be used on several ranks, and what to do; None: it can."""
        return None

    def refuse(
        self, params: Sequence[torch.nn.Parameter], groups: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Raises `UserError` if these settings do not support one of the trained `params`."""


LATER = {"later": True}
"""Metadata of an option, or of a result's field, that was added after records existed."""


def settings(options: DataclassInstance) -> dict[str, object]:
    """Returns the values by name, without `LATER` fields at their default. So trials that do not
    use these options keep their identity, and old records keep their text."""
    values = dataclasses.asdict(options)
    for field in dataclasses.fields(options):
        if "later" in field.metadata and values[field.name] == field.default:
            del values[field.name]
    return values


_hints = cache(get_type_hints)  # which compiles the text of each type


def build_options(cls: type[T], given: Mapping[str, object], what: str, path: str = "") -> T:
    """Builds a `cls` from `given`; every key must be a field and every value of the field's type.

    Args:
        cls: a dataclass whose fields are bool, int, float, str, Literal, tuples, dicts, dataclasses
            or unions of these. Its `__post_init__` may raise `UserError` for a bad value.
        what: the kind of key in messages, e.g. `dear option`.
        path: key under which `given` stands in another mapping, e.g. `optimizer`; for messages.

    Raises:
        UserError: an unknown key, a missing one, or a value of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = _hints(cls)
    prefix = f"{path}." if path else ""
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            if not fields:
                raise UserError(f"unknown {what} {key!r}: there are none")
            error = unknown("key" if path else what, key, fields, "see `list --keys`")
            raise UserError(f"{what} {path!r}: {error}") if path else error
        values[key] = _convert(value, hints[key], what, f"{prefix}{key}")
    for name, field in fields.items():
        missing = field.default is field.default_factory is dataclasses.MISSING
        if missing and name not in values:
            raise UserError(f"{what} {prefix + name!r} is missing")
    return cls(**values)


def option_of(options: Options, field: str, value: object = None) -> str:
    """Returns an option for messages: `dear option 'density'`, or `dear option density=VALUE`."""
    # An algorithm is named after its file.
    name = type(options).__module__.rpartition(".")[2].replace("_", "-")
    return f"{name} option {field!r}" if value is None else f"{name} option {field}={value}"


def only_with(options: Options, field: str, other: str, values: Sequence[object]) -> None:
    """Raises `UserError` if `field` is not at its default and `other` is not one of `values`.

    Some fields take effect only with certain values of another field. Without this check they
    would be ignored silently.
    """
    default = next(f.default for f in dataclasses.fields(options) if f.name == field)
    if getattr(options, field) != default and getattr(options, other) not in values:
        *first, last = map(str, values)
        wanted = f"{', '.join(first)} or {last}" if first else last
        raise UserError(
            f"{option_of(options, field)} needs {other}={wanted}, got "
            f"{other}={getattr(options, other)!r}"
        )


def _convert(value: object, hint: Any, what: str, path: str) -> object:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), what, path)
    if origin is Literal:
        if value not in get_args(hint):
            allowed = [str(choice) for choice in get_args(hint)]
            raise UserError(f"{what} {path!r}: {unknown('value', value, allowed)}")
        return value
    if origin is tuple:
        inner = get_args(hint)[0]
        if not isinstance(value, (list, tuple)):
            return (_convert(value, inner, what, path),)
        return tuple(_convert(v, inner, what, f"{path}.{i}") for i, v in enumerate(value))
    if hint is Any:
        return value
    mapping = origin is dict or hint is dict
    if mapping or dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _mismatch(what, path, value, "a mapping of names to values")
        if not mapping:
            return build_options(hint, value, what, path)
        inner = get_args(hint)
        kind = inner[1] if inner else Any
        return {key: _convert(each, kind, what, f"{path}.{key}") for key, each in value.items()}
    return _convert_scalar(value, hint, what, path)


def _convert_union(value: object, hints: Sequence[object], what: str, path: str) -> object:
    if value is None and type(None) in hints:
        return None
    errors = []
    for hint in hints:
        if hint is type(None):
            continue
        try:
            return _convert(value, hint, what, path)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _convert_scalar(value: object, hint: type, what: str, path: str) -> object:
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 1e-3 (no dot) as text.
        try:
            return float(value)
        except ValueError:
            raise _mismatch(what, path, value, "a number") from None
    # Numbers of numpy and torch count, too.
    if hint is float and not isinstance(value, bool | str) and hasattr(value, "__float__"):
        try:
            return float(value)
        except OverflowError:
            raise _mismatch(what, path, value, "a number below 1e308") from None
    right = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    if right and isinstance(value, int) and abs(value) >= 1 << 63:
        raise _mismatch(what, path, value, "a whole number of less than 64 bits")
    if not right:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise _mismatch(what, path, value, names[hint])
    return value


def _mismatch(what: str, path: str, value: object, wanted: str) -> UserError:
    return UserError(f"{what} {path!r}: must be {wanted}, got {value!r}")


def whole(name: str, value: object) -> None:
    """Raises `UserError` unless `value` is a whole number."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UserError(f"{name} must be a whole number, got {value!r}")


def true_or_false(name: str, value: object) -> None:
    """Raises `UserError` unless `value` is True or False."""
    if value not in (True, False):
        raise UserError(f"{name} must be True or False, got {value!r}")


def _check_number(name: str, value: object) -> None:
    # Predictions have numbers of their own types, so only what is no number is named.
    if isinstance(value, bool | str | bytes | Sequence | Mapping):
        raise UserError(f"{name} must be a number, got {value!r}")


def at_least(name: str, value: float | None, least: float, most: float = math.inf) -> None:
    """Raises `UserError` unless `value` is None, or finite and from `least` to `most`."""
    _check_number(name, value)
    if value is not None and not (least <= value <= most and value < math.inf):
        end = f" and at most {most}" if most < math.inf else ""
        raise UserError(f"{name} must be at least {least:g}{end}, got {value}")


def positive(name: str, value: float | None, most: float = math.inf) -> None:
    """Raises `UserError` unless `value` is None, or finite, `> 0` and at most `most`."""
    _check_number(name, value)
    if value is not None and not (0 < value <= most and value < math.inf):
        end = "finite" if most == math.inf else f"at most {most}"
        raise UserError(f"{name} must be greater than 0 and {end}, got {value}")
