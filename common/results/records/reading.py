"""Conversion of JSON values to typed dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

JsonObject: TypeAlias = dict[str, Any]


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Returns the items by key, in the order of first appearance."""
    groups: dict[K, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def typed(hint: Any, value: Any) -> Any:
    """Converts a JSON value to the type `hint`; drops keys that a dataclass does not have."""
    read = _reader(hint)
    return value if read is None or value is None else read(value)


@functools.cache
def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """Returns the function that converts values other than None to the type `hint`. Returns None if
    JSON values need no conversion. Results are cached: records have many values."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _reader(next(kind for kind in inner if kind is not types.NoneType))
    if origin in (list, tuple):
        read = _reader(inner[0])
        if read is None:  # JSON has no tuples
            return tuple if origin is tuple else None
        return lambda values: origin(None if v is None else read(v) for v in values)
    if origin is dict:
        read = _reader(inner[1])
        if read is None:
            return None
        return lambda values: {k: None if v is None else read(v) for k, v in values.items()}
    if dataclasses.is_dataclass(hint):
        readers = {key: _reader(kind) for key, kind in get_type_hints(hint).items()}

        def build(values: Any) -> Any:
            if isinstance(values, hint):
                return values
            fields = {}
            for key, read in readers.items():
                if key in values:
                    value = values[key]
                    fields[key] = value if read is None or value is None else read(value)
            return hint(**fields)

        return build
    return None
