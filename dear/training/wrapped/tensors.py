"""Parameters of which each rank has a part, and whole tensors made of parts."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsIndex, TypeVar

from dear.comm.backends import mismatch_errors
from dear.errors import UserError
from dear.lazy import torch
from dear.training.engine import in_parts
from dear.training.inflight import InFlight, Mixin, as_plain

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

T = TypeVar("T")


def full(value: T) -> T | torch.Tensor:
    """Returns the whole of a sharded tensor, in its own memory; a collective call."""
    if not in_parts(value):
        return value
    if not value.placements[0].is_shard():
        return value.full_tensor()
    # `full_tensor()` does the same, but its errors have lost their class.
    rows, *rest = value.shape
    mesh = value.device_mesh
    mine = value.to_local()
    padded = mine.new_zeros((-(-rows // mesh.size()), *rest))
    padded[: len(mine)] = mine
    whole = padded.new_empty((mesh.size() * len(padded), *rest))
    with _together():
        mesh.get_group()._allgather_base(whole, padded).wait()
    return whole[:rows].clone() if len(whole) > rows else whole


def shard(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a copy of this rank's part of a whole `value`, sharded like `like`; sends nothing."""
    from torch.distributed.tensor import distribute_tensor

    assert in_parts(like)
    part = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()


class Together:
    """Collective of torch's FSDP; raises `UserError` where the ranks call different operations."""

    def __init__(self, collective: AllGather | ReduceScatter) -> None:
        self._call: Callable[..., object] = collective.__call__
        self.allocate = collective.allocate

    def __call__(self, *args: object, **kwargs: object) -> object:
        with _together():
            return self._call(*args, **kwargs)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Raises `UserError` where the ranks call different operations; adds a note to other errors."""
    advice = (
        "fsdp: each rank holds a part of the parameters, so all ranks must run the same passes, "
        "and load state, call state_dict() and synchronize() together"
    )
    try:
        yield
    except mismatch_errors() as error:
        raise UserError(f"{advice}; one of them did not: {error}") from None
    except RuntimeError as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(advice)
        raise


class _Part(Mixin):
    """Mixin for the class of a sharded parameter."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        value: torch.Tensor = as_plain(self, operator.attrgetter("data"))
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise UserError(
            "fsdp: a value that is assigned to `.data` of a sharded parameter would be lost; call "
            "optimizer.synchronize() before, or copy_() the value into the parameter"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return as_plain(self, lambda param: copy.deepcopy(param, memo))

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return as_plain(self, lambda param: param.__reduce_ex__(protocol))


def _explained(
    cls: type,
    func: Callable[..., object],
    types: Sequence[type],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> object:
    """Runs torch's `func` with a sharded parameter; raises `UserError` if torch cannot."""
    if func is torch.autograd.grad:
        raise UserError(
            "fsdp: torch.autograd.grad() has no gradients of sharded parameters; "
            "call backward(), or use algorithm='dear'"
        )
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"fsdp: torch cannot run {getattr(func, '__name__', func)}() on a sharded "
            f"parameter ({error}); call optimizer.synchronize() before, or use algorithm='dear'"
        ) from None
    if in_parts(result) and not isinstance(result, _Part):
        kind = next(kind for kind in types if issubclass(kind, _Part))
        setattr(result, "__class__", kind)  # noqa: B010  (mypy has no other way)
    return result


class Parts(InFlight):
    """Sharded parameters of one engine."""

    mixin = _Part
    function = staticmethod(_explained)

    def __init__(self) -> None:
        super().__init__(lambda: None)
