"""Flat memory of parameters and gradients, which collectives read and write in place."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from dear.comm.communicator import Communicator, buffer, padded
from dear.errors import UserError
from dear.lazy import torch

ARENA_BYTES = 16 * 2**20
ALIGNMENT_BYTES = 64

B = TypeVar("B", bound="Bucket")


class Bucket:
    """Parameters that travel together: values in flat memory, gradients, or both.

    Values and gradients lie in one order, each parameter's in its own memory order, so that a
    collective moves a bucket as one tensor and an optimizer sees every parameter by itself.
    Without flat memory (then parameters may be of several kinds) a bucket still notices when
    somebody changes their gradients.

    Gradients get in on one of two ways. `adopt` makes `p.grad` a view of the bucket: autograd makes
    a gradient of its own where there was none (after `zero_grad()`), which costs one copy; one that
    is a view already (further backward passes, `zero_grad(set_to_none=False)`) is added to in
    place. `pack` leaves `p.grad` alone and copies, with a mark per parameter behind the gradients:
    1 where this rank has one, so that after a sum over ranks 0 means that nobody has.

    Args:
        values: flat; each `p.data` becomes a view of it, so that nothing is copied ever.
        gradients: flat, zeroed, padded as collectives need it.
        spare: flat, as large as `values`: what others send.
        viewed: False lets parameters keep memory of their own; `pull` and `push` copy.
        packed: gradients are copied in, and `gradients` has room for the marks.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        *,
        values: torch.Tensor | None = None,
        gradients: torch.Tensor | None = None,
        spare: torch.Tensor | None = None,
        viewed: bool = True,
        packed: bool = False,
    ) -> None:
        self.params = list(params)
        self.place = {param: i for i, param in enumerate(params)}
        *self.offsets, self.numel = accumulate((p.numel() for p in params), initial=0)
        self.values, self.gradients, self.spare = values, gradients, spare
        self.pieces = [] if values is None else self.views(values)
        """The places of the parameters in `values`, in their shapes."""
        self._spare_pieces = [] if spare is None else self.views(spare)
        self.gradient_views = [] if gradients is None else self.views(gradients)
        self._pointers = _pointers(self.pieces)
        self._gradient_pointers = _pointers(self.gradient_views)
        self._viewed = viewed and values is not None
        self._adopts = gradients is not None and not packed
        self.marks = gradients[self.numel : self.numel + len(self.params)] if packed else None
        self._all_present = False
        self.forget()
        with torch.no_grad():
            if values is not None:
                self._load(viewed)
            if self._adopts:
                self.adopt()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Pieces of `flat`, laid out like this bucket, in shape and memory order of parameters."""
        places = zip(self.offsets, self.params, strict=True)
        return [shaped(flat, offset, param) for offset, param in places]

    def adopt(self) -> None:
        """Lets the gradients that there are become views of the bucket."""
        for param, view in zip(self.params, self.gradient_views, strict=True):
            if param.grad is not None:
                adopt(param, view)

    def pack(self, divisor: int = 1) -> None:
        """Copies the gradients in, divided; a parameter without one contributes zeros."""
        self.copy_gradients(self.gradient_views, divisor)
        has = [param.grad is not None for param in self.params]
        self._all_present = all(has)
        if self._all_present:
            self.marks.fill_(1)
        else:
            self.marks.copy_(torch.tensor(has, dtype=torch.float32))

    def copy_gradients(self, to: Sequence[torch.Tensor], divisor: int = 1) -> None:
        """Copies the gradients, divided, to tensors like `views`; those there are not are 0."""
        with torch.no_grad():
            for param, view in zip(self.params, to, strict=True):
                if param.grad is None:
                    view.zero_()
                elif divisor == 1:
                    view.copy_(param.grad)
                else:
                    torch.div(param.grad, divisor, out=view)

    def means(self) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        """What a collective made of what was packed; None where no rank has a gradient."""
        if self._all_present:  # then no mark can be 0, and the device need not be asked
            return dict(zip(self.params, self.gradient_views, strict=True))
        marks = self.marks.abs().tolist()
        found = zip(self.params, self.gradient_views, marks, strict=True)
        return {param: view if mark > 0 else None for param, view, mark in found}

    def note(self) -> None:
        """Remembers the gradients as they are, to notice changes; those there are not are zero."""
        self._seen = [param.grad for param in self.params]
        if self._adopts:
            for i, view in enumerate(self.gradient_views):
                if self._seen[i] is None:
                    view.zero_()
                else:
                    self._seen[i] = view
        self._versions = self._counters()
        self._sampled = _sample(self.params)

    def forget(self) -> None:
        """Lets go of what was noted; nothing counts as changed until the next `note`."""
        self._seen: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._sampled: torch.Tensor | None = None

    def changed(self) -> torch.nn.Parameter | None:
        """A parameter whose gradient is another, or has been written to, since `note`."""
        for param, seen in zip(self.params, self._seen, strict=False):
            if param.grad is not seen:
                return param
        now = self._counters() if self._seen else []
        for param, before, after in zip(self.params, self._versions, now, strict=False):
            if before != after:
                return param
        return None

    def _counters(self) -> list[int]:
        """The version counters of what was seen; views of one tensor share one."""
        if self._adopts:
            return [self.gradients._version]
        return [0 if gradient is None else gradient._version for gradient in self._seen]

    def refuse_changed(self) -> None:
        """Raises `UserError` if a gradient has changed since `note`."""
        param = self.changed()
        if param is not None:
            raise UserError(
                f"the gradient of a parameter of shape {tuple(param.shape)} was changed between "
                "backward() and step(); call optimizer.synchronize() before clipping or unscaling, "
                "so that the change applies to the averaged gradient"
            )

    def scaled_in_place(self) -> bool:
        """True if a gradient's values are not those at `note`; waits for the device.

        A GradScaler changes values and leaves version counters as they are.
        """
        if self._sampled is None:
            return False
        now = _sample(self.params)
        return now is not None and not torch.equal(now, self._sampled)

    def reclaim(self) -> bool:
        """Takes parameters back that got other memory; False if one is of another kind now.

        `module.to(...)` moves parameters and gradients by giving the same objects other memory.
        """
        if _pointers(self.gradient_views) != self._gradient_pointers:
            return False
        if self.values is None:
            return all(_kind(param) == _kind(self.gradients) for param in self.params)
        if self._viewed and _pointers(self.params) == self._pointers:
            return True
        for param, piece in zip(self.params, self.pieces, strict=True):
            if _kind(param) != _kind(piece) or param.shape != piece.shape:
                return False
            if self._viewed and param.stride() != piece.stride():
                return False
        if self._viewed:
            with torch.no_grad():
                self._load(viewed=True)
        return True

    def pull(self) -> None:
        """`values` is what the parameters are."""
        if not self._viewed:
            self._load(viewed=False)

    def push(self) -> None:
        """The parameters are what `values` is."""
        if self._viewed:
            self.touched()
        else:
            for param, piece in zip(self.params, self.pieces, strict=True):
                param.copy_(piece)

    def take_spare(self) -> None:
        """The parameters become what `spare` is; by another view, where they are views."""
        self.values, self.spare = self.spare, self.values
        self.pieces, self._spare_pieces = self._spare_pieces, self.pieces
        self._pointers = _pointers(self.pieces)
        if self._viewed:
            for param, piece in zip(self.params, self.pieces, strict=True):
                param.data = piece
        self.push()

    def touched(self) -> None:
        """Tells autograd that the values have changed, as an optimizer's update would."""
        # It refuses where nothing needs a gradient; then nothing keeps values for one either.
        if any(param.requires_grad for param in self.params):
            torch.autograd.graph.increment_version(self.params)

    def release(self) -> None:
        """Gives parameters and gradients memory of their own again."""
        for param, view in zip(self.params, self.gradient_views, strict=False):
            if param.grad is view:
                param.grad = view.clone()
        for param, pointer in zip(self.params, self._pointers, strict=False):
            if self._viewed and param.data_ptr() == pointer:
                param.data = param.data.clone()
        self._viewed = False

    def _load(self, viewed: bool) -> None:
        """Copies parameters into their places that are not there, and lets them be views."""
        for param, piece in zip(self.params, self.pieces, strict=True):
            if param.data_ptr() != piece.data_ptr():
                piece.copy_(param)
                if viewed:
                    param.data = piece


def adopt(param: torch.nn.Parameter, view: torch.Tensor) -> None:
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


def with_gradients(
    gradients: Mapping[torch.nn.Parameter, torch.Tensor | None], update: Callable[[], Any]
) -> Any:
    """`update()` while each `p.grad` is what `gradients` says."""
    kept = {param: param.grad for param in gradients}
    try:
        for param, gradient in gradients.items():
            param.grad = gradient
        return update()
    finally:
        for param, gradient in kept.items():
            param.grad = gradient


def flatten(
    groups: Sequence[Sequence[torch.nn.Parameter]], communicator: Communicator, *, values: bool
) -> list[Bucket]:
    """A bucket per group that adopts gradients and, if asked for, holds values.

    Few buffers, a part at a time, so that little memory is held twice. Each bucket is padded to a
    multiple of the world size.
    """
    result: list[Bucket] = []
    waiting: list[Sequence[torch.nn.Parameter]] = []
    for params, following in zip(groups, [*groups[1:], None], strict=True):
        waiting.append(params)
        large = sum(param.nbytes for group in waiting for param in group) >= ARENA_BYTES
        if large or following is None or _kind(following[0]) != _kind(params[0]):
            result += _lay_out(waiting, communicator, values)
            waiting.clear()
            _give_back()
    return result


def packed_bucket(params: Sequence[torch.nn.Parameter], world_size: int) -> Bucket:
    """A bucket that copies gradients, in ordinary memory, padded to a multiple of the world."""
    like = params[0]
    numel = padded(sum(param.numel() for param in params) + len(params), world_size)
    gradients = torch.zeros(numel, dtype=like.dtype, device=like.device)
    return Bucket(params, gradients=gradients, packed=True)


def packed_buckets(
    groups: Sequence[Sequence[torch.nn.Parameter]],
    communicator: Communicator,
    kind: Callable[..., B] = Bucket,
) -> list[B]:
    """A bucket (`kind`) per group that copies gradients, where the backend reads in place.

    All of one type and device lie in one buffer: each buffer has a file descriptor.
    """
    places, rooms, likes = [], {}, {}
    for params in groups:
        room = _kind(params[0])
        size = sum(param.numel() for param in params) + len(params)
        start = rooms.get(room, 0)
        places.append((room, slice(start, start + size)))
        rooms[room] = start + padded(size, max(1, ALIGNMENT_BYTES // params[0].element_size()))
        likes[room] = params[0]
    buffers = {room: buffer(likes[room], size, communicator) for room, size in rooms.items()}
    return [
        kind(params, gradients=buffers[room][place], packed=True)
        for params, (room, place) in zip(groups, places, strict=True)
    ]


def value_bucket(
    params: Sequence[torch.nn.Parameter],
    communicator: Communicator,
    *,
    viewed: bool = True,
    shared: bool = True,
    spare: bool = False,
) -> Bucket:
    """A bucket that holds values, of at least one element; gradients stay as they are.

    Args:
        shared: take memory that the backend reads in place.
        spare: with as much memory again, for what others send.
    """
    like, numel = params[0], max(1, sum(param.numel() for param in params))

    def memory() -> torch.Tensor:
        if shared:
            return buffer(like, numel, communicator)
        return torch.zeros(numel, dtype=like.dtype, device=like.device)

    return Bucket(params, values=memory(), spare=memory() if spare else None, viewed=viewed)


def _lay_out(
    groups: Sequence[Sequence[torch.nn.Parameter]], communicator: Communicator, values: bool
) -> list[Bucket]:
    like = groups[0][0]
    step = max(1, ALIGNMENT_BYTES // like.element_size())
    sizes = [padded(sum(p.numel() for p in group), communicator.size) for group in groups]
    room = [padded(size, step) for size in sizes]
    total = max(1, sum(room))
    gradients = buffer(like, total, communicator)
    data = buffer(like, total, communicator) if values else None
    result, at = [], 0
    for group, size, taken in zip(groups, sizes, room, strict=True):
        piece = slice(at, at + size)
        own = None if data is None else data[piece]
        # `data` has a version counter of its own, which the groups of a buffer must not share.
        result.append(Bucket(group, gradients=gradients[piece].data, values=own))
        at += taken
    return result


def _pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _sample(params: Sequence[torch.nn.Parameter]) -> torch.Tensor | None:
    """Some bytes of the last gradient; as bytes, so that nan equals nan."""
    for param in reversed(params):
        gradient = param.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        if gradient.numel():
            count = min(8, gradient.numel())
            return gradient.as_strided((count,), (1,)).clone().view(torch.uint8)
    return None


def _give_back() -> None:
    """Returns freed memory to the system, where the C library can (glibc); elsewhere nothing.

    Tensors of some megabytes come from malloc's heap once one of that size has been freed, and the
    heap keeps what is freed within it: a model that has moved would count twice for ever.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
