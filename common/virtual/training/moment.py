"""Readings of a virtual clock that notice when a program acts on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class Moment:
    """Time, or a sum of times, that a program may store, add up and pass on without notice.

    Every other use, such as a comparison, calls `look` and gets the number.

    Args:
        value: seconds.
        look: notes that the program acts on a time.
    """

    __slots__ = ("_look", "_value")

    def __init__(self, value: float, look: Callable[[], None]) -> None:
        self._value, self._look = value, look

    def number(self) -> float:
        """Returns the seconds, for the program."""
        self._look()
        return self._value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.number(), name)

    def __deepcopy__(self, memo: object) -> Moment:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a reading of a virtual clock that is recorded cannot leave the process")


def _unnoticed(name: str) -> Callable[[Moment, object], Any]:
    method: Callable[[float, object], Any] = getattr(float, name)

    def call(self: Moment, other: object) -> Any:
        result = method(self._value, other._value if isinstance(other, Moment) else other)
        return result if result is NotImplemented else Moment(result, self._look)

    return call


def _noticed(name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(float, name)

    def call(self: Moment, *args: object) -> Any:
        numbers = [arg.number() if isinstance(arg, Moment) else arg for arg in args]
        return method(self.number(), *numbers)

    return call


_SUMS = "add radd sub rsub mul rmul truediv"
_OTHERS = """abs bool ceil divmod eq float floor floordiv format ge gt hash int le lt mod ne neg pos
    pow rdivmod repr rfloordiv rmod round rpow rtruediv str trunc"""
for _words, _wrapper in ((_SUMS, _unnoticed), (_OTHERS, _noticed)):
    for _word in _words.split():
        setattr(Moment, f"__{_word}__", _wrapper(f"__{_word}__"))
