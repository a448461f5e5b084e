"""Parameters and gradients as views of flat buffers that collectives read and write in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.buckets.grouping import padded
from dear.buckets.host_memory import give_back
from dear.buckets.unchanged import sample
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.comm.communicator import Communicator

ARENA_BYTES = 16 * 2**20
ALIGNMENT_BYTES = 64


class FlatGroup:
    """Parameters of one kind side by side, in memory order, padded to a multiple of the world size.

    `param.grad` is a view of `gradients` from the moment it has arrived: autograd makes a gradient
    of its own where there was none (after `zero_grad()`), which costs one copy; a gradient that is
    a view already (further backward passes, `zero_grad(set_to_none=False)`) is added to in place.
    With `values`, `param.data` is a view of that, and nothing is copied ever.

    Args:
        gradients: flat, zeroed.
        values: flat, or None where parameters stay as they are.
    """

    def __init__(
        self, params: Sequence[Parameter], gradients: torch.Tensor, values: torch.Tensor | None
    ) -> None:
        self.params = list(params)
        self.gradients = gradients
        self.values = values
        self.place = {param: i for i, param in enumerate(params)}
        self.offsets: list[int] = []
        offset = 0
        for param in params:
            self.offsets.append(offset)
            offset += param.numel()
        places = zip(self.offsets, params, strict=True)
        self.gradient_views = [shaped(gradients, offset, param) for offset, param in places]
        self._gradient_pointers = [view.data_ptr() for view in self.gradient_views]
        self._places: list[tuple[Parameter, int, torch.Tensor]] = []
        with torch.no_grad():
            for param, view in zip(self.params, self.gradient_views, strict=True):
                if param.grad is not None:
                    adopt(param, view)
            if values is not None:
                for param, offset in zip(self.params, self.offsets, strict=True):
                    view = shaped(values, offset, param)
                    view.copy_(param)
                    param.data = view
                    self._places.append((param, view.data_ptr(), view))
        self._version = 0
        self._sent: list[bool] = []

    def note(self) -> None:
        """Remembers the gradients as they are, to notice changes; those there are not are zero."""
        self._sent = [param.grad is not None for param in self.params]
        for view, sent in zip(self.gradient_views, self._sent, strict=True):
            if not sent:
                view.zero_()
        self._version = self.gradients._version
        self._sampled = sample(self.params)

    def changed(self) -> Parameter | None:
        """A parameter whose gradient is another, or has been written to, since `note`."""
        for param, view, sent in zip(self.params, self.gradient_views, self._sent, strict=True):
            if param.grad is not (view if sent else None):
                return param
        return self.params[0] if self.gradients._version != self._version else None

    def scaled_in_place(self) -> bool:
        """True if a gradient's values are not those at `note`; waits for the device."""
        now = sample(self.params)
        return now is not None and not torch.equal(now, self._sampled)

    def reclaim(self) -> bool:
        """Takes parameters back that got other memory; False if one is of another kind now.

        `module.to(...)` moves parameters and gradients by giving the same objects other memory.
        """
        if [view.data_ptr() for view in self.gradient_views] != self._gradient_pointers:
            return False
        if self.values is None:
            return all(self._same_kind(param) for param in self.params)
        for param, pointer, view in self._places:
            if param.data_ptr() != pointer:
                if not self._same_kind(param):
                    return False
                if (param.shape, param.stride()) != (view.shape, view.stride()):
                    return False
                with torch.no_grad():
                    view.copy_(param)
                param.data = view
        return True

    def _same_kind(self, param: Parameter) -> bool:
        return param.dtype == self.gradients.dtype and param.device == self.gradients.device

    def touched(self) -> None:
        """Tells autograd that the values have changed, as an optimizer's update would."""
        torch.autograd.graph.increment_version(self.params)

    def release(self) -> None:
        """Gives parameters and gradients memory of their own again."""
        with torch.no_grad():
            for param, view in zip(self.params, self.gradient_views, strict=True):
                if param.grad is view:
                    param.grad = view.clone()
            for param, pointer, _ in self._places:
                if param.data_ptr() == pointer:
                    param.data = param.data.clone()
        self._places.clear()


def adopt(param: Parameter, view: torch.Tensor) -> None:
    """Makes `view` the gradient of `param`, with the values of the one it has."""
    gradient = param.grad
    if gradient is not view:
        view.copy_(gradient.detach() if gradient.requires_grad else gradient)
        param.grad = view


def shaped(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The piece of `flat` from `offset` on in shape and, if dense, memory order of `like`."""
    piece = flat.detach()[offset : offset + like.numel()]
    if torch.ops.aten.is_non_overlapping_and_dense(like):
        return piece.as_strided(like.shape, like.stride())
    return piece.view(like.shape)


def flatten(
    groups: Sequence[Sequence[Parameter]], communicator: Communicator, *, values: bool
) -> list[FlatGroup]:
    """Lays out every group; a few buffers at a time, so that little memory is held twice."""
    result: list[FlatGroup] = []
    waiting: list[Sequence[Parameter]] = []

    def lay_out_waiting() -> None:
        result.extend(_lay_out(waiting, communicator, values))
        waiting.clear()
        give_back()

    for params in groups:
        if waiting and _kind(waiting[0]) != _kind(params):
            lay_out_waiting()
        waiting.append(params)
        if sum(param.nbytes for group in waiting for param in group) >= ARENA_BYTES:
            lay_out_waiting()
    lay_out_waiting()
    return result


def buffer(like: torch.Tensor, numel: int, communicator: Communicator) -> torch.Tensor:
    """A zeroed flat buffer of the kind of `like`, in memory that the backend reads in place."""
    if communicator.native and like.device.type == "cpu":
        import comm_core  # not at the top: other backends do without it

        return comm_core.empty(numel, dtype=like.dtype)
    return torch.zeros(numel, dtype=like.dtype, device=like.device)


def _lay_out(
    groups: Sequence[Sequence[Parameter]], communicator: Communicator, values: bool
) -> list[FlatGroup]:
    if not groups:
        return []
    step = max(1, ALIGNMENT_BYTES // groups[0][0].element_size())
    sizes = [padded(sum(p.numel() for p in group), communicator.size) for group in groups]
    room = [padded(size, step) for size in sizes]
    like = groups[0][0]
    total = max(1, sum(room))
    gradients = buffer(like, total, communicator)
    data = buffer(like, total, communicator) if values else None
    result, at = [], 0
    for group, size, taken in zip(groups, sizes, room, strict=True):
        piece = slice(at, at + size)
        own = None if data is None else data[piece]
        # `data` has a version counter of its own, which the groups of a buffer must not share.
        result.append(FlatGroup(group, gradients[piece].data, own))
        at += taken
    return result


def _kind(params: Sequence[Parameter]) -> tuple[torch.device, torch.dtype]:
    return params[0].device, params[0].dtype
