"""Dataclasses from JSON values."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints


def typed(hint: Any, value: Any) -> Any:
    """A value from JSON as what the type hint says; keys that it does not know are left out."""
    read = _reader(hint)
    return value if read is None or value is None else read(value)


@functools.cache
def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """What makes the type of a value that is not None; None: it is that already.

    Made once for each type: a record has thousands of numbers, and there may be thousands of it.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _reader(next(one for one in inner if one is not types.NoneType))
    if origin in (list, tuple):
        read = _reader(inner[0])
        if read is None:  # JSON has no tuples
            return tuple if origin is tuple else None
        return lambda value: origin(None if one is None else read(one) for one in value)
    if origin is dict:
        read = _reader(inner[1])
        if read is None:
            return None
        return lambda value: {k: None if one is None else read(one) for k, one in value.items()}
    if dataclasses.is_dataclass(hint):
        readers = {key: _reader(kind) for key, kind in get_type_hints(hint).items()}

        def made(value: Any) -> Any:
            if isinstance(value, hint):
                return value
            given = {}
            for key, read in readers.items():
                if key in value:
                    one = value[key]
                    given[key] = one if read is None or one is None else read(one)
            return hint(**given)

        return made
    return None
