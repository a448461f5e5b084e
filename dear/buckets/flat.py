"""Buckets: flat memory of parameters and gradients that collectives read and write in place."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias, TypeVar

from dear.comm.communicator import Communicator, mark, padded
from dear.comm.flight.recorder import note_bucket
from dear.errors import UserError
from dear.lazy import torch

ARENA_BYTES = 16 * 2**20
ALIGNMENT_BYTES = 64

B = TypeVar("B", bound="Bucket")
T = TypeVar("T")
Kind: TypeAlias = "tuple[torch.dtype, torch.device]"
Form: TypeAlias = "tuple[torch.Size, tuple[int, ...]]"
"""Shape and strides of a tensor without gaps."""
Gradients: TypeAlias = "Mapping[torch.nn.Parameter, torch.Tensor | None]"
"""Parameters and their gradients; None for those without."""


class Watch:
    """Detects changes of some parameters' gradients after they were recorded.

    Args:
        shared: flat tensor that all gradients are views of; they share its version counter. None:
            each gradient has its own memory.
        views: these views, in the order of `params`.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        shared: torch.Tensor | None,
        views: Sequence[torch.Tensor],
    ) -> None:
        self.params = list(params)
        self._shared = shared
        self._shared_views = views
        self._seen: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._sampled: torch.Tensor | None = None

    def note(self, sampled: bool = True) -> None:
        """Records the current gradients. If gradients share a tensor, missing ones become 0 there.

        Args:
            sampled: True also records a few values, for `scaled_in_place`.
        """
        self._seen = [param.grad for param in self.params]
        for i, view in enumerate(self._shared_views):
            if self._seen[i] is None:
                view.zero_()
            else:
                self._seen[i] = view
        self._versions = self._counters()
        self._sampled = _sample(self.params) if sampled else None

    def forget(self) -> None:
        """Drops the record of `note`; `changed` reports nothing until the next `note`."""
        self._seen, self._versions, self._sampled = [], [], None

    def changed(self) -> torch.nn.Parameter | None:
        """Returns a parameter whose gradient was replaced or written to since `note`, or None."""
        for param, noted in zip(self.params, self._seen, strict=False):
            if param.grad is not noted:
                return param
        now = self._counters() if self._seen else []
        for param, before, after in zip(self.params, self._versions, now, strict=False):
            if before != after:
                return param
        return None

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
        """Returns True if sampled values differ from those at `note`; waits for the device.

        A GradScaler changes values without changing version counters.
        """
        if self._sampled is None:
            return False
        now = _sample(self.params)
        return now is not None and not torch.equal(now, self._sampled)

    def _counters(self) -> list[int]:
        if self._shared is not None:
            return [self._shared._version]
        return [0 if gradient is None else gradient._version for gradient in self._seen]


class Bucket(Watch):
    """Parameters that travel together, with flat memory for their values, gradients, or both.

    Values and gradients have the same order, and each parameter keeps the memory order that it has
    when the bucket is made. So a collective moves a bucket as one tensor, and an optimizer sees
    each parameter as a tensor.
    A bucket may also have no flat memory. Its parameters may then differ in dtype and device, and
    the bucket only detects changes of their gradients.

    Gradients enter the bucket in one of two ways:

    - `adopt` makes `p.grad` a view of the bucket. If `p.grad` was None (after `zero_grad()`),
      autograd allocates the gradient, and `adopt` copies it once. If `p.grad` is a view already
      (further backward passes, `zero_grad(set_to_none=False)`), autograd adds to it in place.
    - `pack` copies the gradients and does not change `p.grad`. It appends one mark per parameter: 1
      if this rank has a gradient, else 0. A sum of 0 means that no rank has one.

    Args:
        values: flat; each `p.data` becomes a view of it, so that no later copy is needed.
        gradients: flat, zeroed, padded as the collectives require.
        spare: flat, as large as `values`; receives the values of other ranks.
        viewed: if False, parameters keep their own memory, and `pull` and `push` copy.
        packed: gradients enter by `pack`, and `gradients` has room for the marks.
    """

    # These exist only if the constructor gets them.
    values: torch.Tensor
    gradients: torch.Tensor
    spare: torch.Tensor
    marks: torch.Tensor
    """Part of the gradients of a packed bucket."""

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
        # State may lie in these forms after the script has changed those of the parameters.
        self._forms = [_form(param) for param in params]
        self._strides = [param.stride() for param in params]
        self.pieces: list[torch.Tensor] = []
        """Views of `values`: one per parameter, in its shape."""
        self._spare_pieces: list[torch.Tensor] = []
        self.gradient_views: list[torch.Tensor] = []
        if values is not None:
            self.values, self.pieces = values, self.views(values)
        if spare is not None:
            self.spare, self._spare_pieces = spare, self.views(spare)
        if gradients is not None:
            self.gradients, self.gradient_views = gradients, self.views(gradients)
        if gradients is not None and packed:
            self.marks = gradients[self.numel : self.numel + len(self.params)]
        adopted = [] if packed else self.gradient_views
        super().__init__(self.params, None if packed else gradients, adopted)
        self._pointers = _pointers(self.pieces)
        self._gradient_pointers = _pointers(self.gradient_views)
        note_bucket(params, values, gradients, spare)
        self._viewed = viewed and values is not None
        self._all_present = False
        with torch.no_grad():
            if self.pieces:
                self._load(viewed)
            if adopted:
                self.adopt()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns one view of `flat` per parameter, in its form and at its place in the bucket."""
        flat = flat.detach()
        triples = zip(self.offsets, self.params, self._forms, strict=True)
        return [flat[at : at + p.numel()].as_strided(*form) for at, p, form in triples]

    def adopt(self) -> None:
        """Makes the existing gradients views of the bucket."""
        for param, view in zip(self.params, self.gradient_views, strict=True):
            adopt(param, view)

    def pack(self, divisor: int = 1) -> None:
        """Copies the gradients in, divided by `divisor`; a missing gradient counts as zeros.

        Raises:
            UserError: a parameter has got another type or device.
        """
        kind = _kind(self.gradients)
        for param in self.params:
            if _kind(param) != kind:
                raise UserError(
                    f"a parameter of shape {tuple(param.shape)} was {kind[0]} on {kind[1]} when "
                    f"the optimizer was distributed, but is {param.dtype} on {param.device} now; "
                    "close() the optimizer before you move the model, and wrap again"
                )
        self.copy_gradients(self.gradient_views, divisor)
        has = [param.grad is not None for param in self.params]
        self._all_present = all(has)
        mark(self.marks, has)

    def copy_gradients(self, to: Sequence[torch.Tensor], divisor: int = 1) -> None:
        """Copies gradients / `divisor` into `to`, one tensor per parameter; a missing one is 0."""
        if torch.is_grad_enabled():  # a context costs as much as the copy of a small gradient
            with torch.no_grad():
                self.copy_gradients(to, divisor)
            return
        for param, view in zip(self.params, to, strict=True):
            gradient = param.grad
            if gradient is None:
                view.zero_()
            elif divisor == 1:
                view.copy_(gradient)
            else:
                torch.div(gradient, divisor, out=view)

    def means(self) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        """Returns the mean gradients after the collective; None for those that no rank has.

        They are views of the bucket, or copies if parameters have another memory order now: some
        optimizers read both as they lie.
        """
        means: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        for param, view, strides in zip(
            self.params, self.gradient_views, self._strides, strict=True
        ):
            # `module.to(...)` gives gradients other memory, so they must be other objects.
            same = param.stride() == strides
            means[param] = view.detach() if same else torch.empty_like(param).copy_(view)
        if not self._all_present:  # else no mark is 0, and none is copied from the device
            marks: list[float] = self.marks.abs().tolist()
            means.update({p: None for p, m in zip(self.params, marks, strict=True) if not m > 0})
        return means

    def reclaim(self) -> bool:
        """Makes parameters views of this bucket again; returns False if they no longer fit.

        `module.to(...)` keeps the parameter and gradient objects but gives them other memory.
        """
        if _pointers(self.gradient_views) != self._gradient_pointers:
            return False
        if not self.pieces:
            kind = _kind(self.gradients)
            pairs = zip(self.params, self._strides, strict=True)
            return all(_kind(p) == kind and p.stride() == strides for p, strides in pairs)
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
        """Copies the parameters into `values` unless they are views of it."""
        if not self._viewed:
            self._load(viewed=False)

    def push(self) -> None:
        """Makes new content of `values` the values of the parameters."""
        if self._viewed:
            self.touched()
        else:
            for param, piece in zip(self.params, self.pieces, strict=True):
                param.copy_(piece)

    def take_spare(self) -> None:
        """Swaps `values` and `spare`, so that parameters get the values that were received."""
        self.values, self.spare = self.spare, self.values
        self.pieces, self._spare_pieces = self._spare_pieces, self.pieces
        self._pointers = _pointers(self.pieces)
        if self._viewed:
            for param, piece in zip(self.params, self.pieces, strict=True):
                param.data = piece
        self.push()

    def versions(self) -> list[tuple[int, int]]:
        """Returns, per parameter, its version counter and its address.

        A change in place raises the counter; an assignment to `p.data` changes the address."""
        return [(param._version, param.data_ptr()) for param in self.params]

    def touched(self) -> None:
        """Tells autograd that the values have changed, as an optimizer's update would."""
        # increment_version raises if no tensor requires a gradient; no graph has saved values then.
        if any(param.requires_grad for param in self.params):
            torch.autograd.graph.increment_version(self.params)

    def release(self) -> None:
        """Gives parameters and gradients their own memory again."""
        for param, view in zip(self.params, self.gradient_views, strict=False):
            if param.grad is view:
                param.grad = view.clone()
        for param, pointer in zip(self.params, self._pointers, strict=False):
            if self._viewed and param.data_ptr() == pointer:
                param.data = param.data.clone()
        self._viewed = False

    def _load(self, viewed: bool) -> None:
        """Copies parameters that lie elsewhere into `values`; makes them views if `viewed`."""
        for param, piece in zip(self.params, self.pieces, strict=True):
            if param.data_ptr() != piece.data_ptr():
                piece.copy_(param)
                if viewed:
                    param.data = piece


def adopt(param: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Copies the gradient of `param`, if there is one, into `view`, which becomes the gradient."""
    gradient = param.grad
    if gradient is not None and gradient is not view:
        view.copy_(gradient.detach() if gradient.requires_grad else gradient)
        param.grad = view


def shaped(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the piece of `flat` from `offset` on, in the form of `like`."""
    return flat.detach()[offset : offset + like.numel()].as_strided(*_form(like))


def _form(tensor: torch.Tensor) -> Form:
    """Returns shape and strides; of a tensor with gaps, the strides of a contiguous one."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.shape, tensor.stride()
    return tensor.shape, torch.empty(tensor.shape, device="meta").stride()


def with_gradients(gradients: Gradients, update: Callable[[], T]) -> T:
    """Runs `update()` with each `p.grad` set to its entry in `gradients`, then restores them."""
    saved = {param: param.grad for param in gradients}
    try:
        for param, gradient in gradients.items():
            param.grad = gradient
        return update()
    finally:
        for param, gradient in saved.items():
            param.grad = gradient


def flatten(
    groups: Sequence[Sequence[torch.nn.Parameter]], communicator: Communicator, *, values: bool
) -> list[Bucket]:
    """Makes one bucket per group, for its gradients and, if `values`, for its parameters' values.

    Buckets share large buffers. Each buffer is filled before the next is allocated, so only a small
    part of the model exists twice. Each bucket is padded to a multiple of the world size.
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
    """Makes a packed bucket in ordinary memory, padded to a multiple of the world size."""
    like = params[0]
    numel = padded(sum(param.numel() for param in params) + len(params), world_size)
    gradients = torch.zeros(numel, dtype=like.dtype, device=like.device)
    return Bucket(params, gradients=gradients, packed=True)


def packed_buckets(
    groups: Sequence[Sequence[torch.nn.Parameter]],
    communicator: Communicator,
    kind: type[B],
) -> list[B]:
    """Makes one packed bucket (`kind`) per group, in memory that the backend reads in place.

    Buckets of one dtype and device share a buffer, since each buffer takes a file descriptor.
    """
    slices: list[tuple[Kind, slice]] = []
    lengths: dict[Kind, int] = {}
    likes: dict[Kind, torch.nn.Parameter] = {}
    for params in groups:
        key = _kind(params[0])
        size = sum(param.numel() for param in params) + len(params)
        start = lengths.get(key, 0)
        slices.append((key, slice(start, start + size)))
        lengths[key] = start + padded(size, max(1, ALIGNMENT_BYTES // params[0].element_size()))
        likes[key] = params[0]
    buffers = {key: communicator.allocate(likes[key], size) for key, size in lengths.items()}
    return [
        kind(params, gradients=buffers[key][place], packed=True)
        for params, (key, place) in zip(groups, slices, strict=True)
    ]


def value_bucket(
    params: Sequence[torch.nn.Parameter],
    communicator: Communicator,
    *,
    viewed: bool = True,
    shared: bool = True,
    spare: bool = False,
) -> Bucket:
    """Makes a bucket of values (at least one element); gradients keep their own memory.

    Args:
        shared: use memory that the backend reads in place.
        spare: allocate a second buffer of this size, for the values of other ranks.
    """
    like, numel = params[0], max(1, sum(param.numel() for param in params))

    def memory() -> torch.Tensor:
        if shared:
            return communicator.allocate(like, numel)
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
    gradients = communicator.allocate(like, total)
    data = communicator.allocate(like, total) if values else None
    result, start = [], 0
    for group, size, stride in zip(groups, sizes, room, strict=True):
        piece = slice(start, start + size)
        value_piece = None if data is None else data[piece]
        # `.data` gives each bucket its own version counter; views of one buffer would share it.
        result.append(Bucket(group, gradients=gradients[piece].data, values=value_piece))
        start += stride
    return result


def _pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _kind(tensor: torch.Tensor) -> Kind:
    return tensor.dtype, tensor.device


def _sample(params: Sequence[torch.nn.Parameter]) -> torch.Tensor | None:
    """Returns up to 8 elements of the last gradient as bytes, so that nan equals nan."""
    for param in reversed(params):
        gradient = param.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        if gradient.numel():
            count = min(8, gradient.numel())
            return gradient.as_strided((count,), (1,)).clone().view(torch.uint8)
    return None


def _give_back() -> None:
    """Returns freed memory to the system with glibc's `malloc_trim`; does nothing without it.

    After the first tensor of some megabytes is freed, malloc serves that size from its heap, and
    the heap keeps freed memory. Without the trim, a moved model would occupy its memory twice.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
