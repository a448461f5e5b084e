"""Parameters in flight: parameters whose update has begun and is not complete.

Between `step()` and the next forward pass a script may clamp, average, copy or save parameters.
Their updates may not be complete by then. So for this time such parameters belong to a subclass of
their class. Torch asks the subclass before each function that takes one of them, and the subclass
first lets the engine complete (settle) all updates. Other parameters cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, SupportsIndex, TypeVar

from dear.lazy import torch
from dear.training.hooks import reads_values

T = TypeVar("T")


class Mixin:
    """Mixin for the class of a parameter in flight."""

    __slots__ = ()
    plain: ClassVar[type]
    """Class of the parameter at other times."""

    @staticmethod
    def settle() -> None:
        """Completes all pending updates; the engine replaces this method."""

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        self.settle()
        return self.__deepcopy__(memo)  # of the plain class

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        self.settle()
        return self.__reduce_ex__(protocol)

    # Torch would call `__torch_function__`, which takes ten times as long in each `zero_grad()`.
    # `as_plain` with a lambda takes half as long again as these lines.
    @property
    def grad(self) -> torch.Tensor | None:
        kind = type(self)
        setattr(self, "__class__", kind.plain)  # noqa: B010  (mypy has no other way)
        try:
            return self.grad
        finally:
            setattr(self, "__class__", kind)  # noqa: B010

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        kind = type(self)
        setattr(self, "__class__", kind.plain)  # noqa: B010
        try:
            self.grad = value
        finally:
            setattr(self, "__class__", kind)  # noqa: B010

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def touched(
    cls: type,
    func: Callable[..., object],
    types: Sequence[type],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> object:
    """Runs the torch function `func`; first settles parameters if `func` reads their values."""
    if reads_values(func):
        for kind in types:
            if issubclass(kind, Mixin):
                kind.settle()
        return func(*args, **(kwargs or {}))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def as_plain(param: Mixin, call: Callable[[Mixin], T]) -> T:
    kind = type(param)
    setattr(param, "__class__", kind.plain)  # noqa: B010
    try:
        return call(param)
    finally:
        setattr(param, "__class__", kind)  # noqa: B010


class InFlight:
    """Parameters of one engine that are in flight.

    Args:
        settle: completes all pending updates, and calls `land` for each parameter.
    """

    mixin: type[Mixin] = Mixin
    """First base class of the classes of parameters in flight."""
    function: Callable[..., object] = staticmethod(touched)
    """`__torch_function__` of these classes."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._kinds: dict[type, type] = {}
        """Class of parameters in flight, by their own class."""

    def launch(self, params: Iterable[torch.Tensor]) -> None:
        """Puts `params` in flight: `settle` runs before anything reads or writes one of them."""
        for param in params:
            kind = type(param)
            setattr(param, "__class__", self._kinds.get(kind) or self._kind(kind))  # noqa: B010

    def land(self, params: Iterable[torch.Tensor]) -> None:
        """Gives `params` their own class again, just before their update is completed."""
        for param in params:
            if isinstance(param, Mixin):
                setattr(param, "__class__", param.plain)  # noqa: B010

    def _kind(self, plain: type) -> type:
        members = {
            "plain": plain,
            "settle": staticmethod(self._settle),
            "__torch_function__": classmethod(torch.compiler.disable(self.function)),
            "__slots__": (),
        }
        metaclass: type[type] = type(plain)
        kind = self._kinds[plain] = metaclass(plain.__name__, (self.mixin, plain), members)
        return kind
