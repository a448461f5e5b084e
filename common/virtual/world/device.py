"""Device of a virtual rank: its pace, and arithmetic that takes time but is not done."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.models.replay.pace import BackwardPass, Pace
from common.models.replay.plan import Unit, Work
from common.virtual.world.marks import SMALL, large, zeros
from common.virtual.world.network import Network

T = TypeVar("T")
_FRESH = ("clone", "_to_copy", "zeros_like")
_BINARY = ("add", "sub", "mul", "div", "sqrt", "neg", "rsub", "pow")
_WRITES = (
    *_BINARY, "copy", "fill", "zero", "addcmul", "addcdiv", "lerp", "clamp", "clamp_min",
    "normal", "uniform", "random", "maximum", "sign", "split_with_sizes_copy", "chunk_cat",
)  # fmt: skip
"""Names of operators, without underscores at the end. They do nothing if they write to a large
tensor. All other operators run as usual."""


class VirtualPace(Pace):
    """Pace of replayed compute on a virtual clock: compute advances the clock."""

    def __init__(self, network: Network) -> None:
        super().__init__(1.0, None)
        self._network = network
        self.computing = False
        """True while replayed compute runs, which takes its time from the profile."""
        self._apart = False

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Returns a context in which arithmetic takes no time of the device."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def take(self, seconds: float, name: str) -> None:
        """Advances the clock for an operation, unless another place accounts for its time."""
        if not self._apart and not self.computing:
            self._compute(seconds, name)

    def clock(self) -> float:
        return self._network.clock()

    def settle(self) -> None:
        """Does nothing: host and device are one."""

    def late_s(self) -> float:
        return 0.0

    def begin(self, seconds: float, lead_s: float = 0.0) -> None:
        self.computing = True
        assert self.part is not None, "a part of the model begins"
        self._compute(seconds, self.part.module, self.part)

    def hold(self, seconds: float) -> None:
        """Advances the clock by `seconds` of compute."""
        self._compute(seconds, "copy")

    def _compute(self, seconds: float, name: str, part: Work | Unit | None = None) -> None:
        self.queued_s += seconds
        recorder = self._network.recorder
        if recorder is None:
            self._network.compute(seconds, part)
            return
        start_s = self.clock()
        self._network.compute(seconds, part)
        if seconds:
            recorder.computed(name, start_s, self.clock())

    def backward_pass(self, lead: object) -> BackwardPass:
        return _OnTime(self)

    def rest(self) -> float:
        return 0.0

    def finish(self) -> None:
        self.computing = False

    def work(self, compute: Callable[[], T], seconds: Callable[[], float]) -> T:
        self.computing = True
        self._compute(0.0, "update")
        result = compute()
        self._compute(seconds(), "update")
        self.finish()
        return result


class _OnTime:
    """Backward pass whose host is never late."""

    def __init__(self, pace: VirtualPace) -> None:
        self.next, self.end = pace.begin, pace.finish

    def left(self, nbytes: int) -> None:
        return


class Arithmetic(TorchDispatchMode):
    """Mode in which arithmetic on large tensors does nothing, but takes the device's time.

    Nobody reads the values of a replayed model. Memory that is never written costs nothing, since
    the kernel gives it no pages, so a model of any size fits. Arithmetic outside replayed compute,
    such as a copy of gradients into a bucket, takes the time of its memory traffic: each operator
    is one kernel, which reads its inputs and writes its result.
    """

    def __init__(self, pace: VirtualPace, memory_bytes_per_s: float) -> None:
        super().__init__()
        self._pace, self._memory_bytes_per_s = pace, memory_bytes_per_s
        self._rules: dict[int, _Rule] = {}
        """Rules by the `id` of the operator, whose own hash is slow. Operators live forever."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap `__torch_dispatch__`, which takes longer than the method itself.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = self._rules.get(id(func))
        if rule is None:
            rule = self._rules[id(func)] = _Rule(func)
        if rule.as_usual:
            return func(*args, **kwargs)
        if rule.written is not None:
            written = rule.written(args, kwargs)
            tensors = written if isinstance(written, (list, tuple)) else (written,)
            if not any(map(large, tensors)):
                return func(*args, **kwargs)
            seconds = rule.traffic(args, tensors) / self._memory_bytes_per_s
            self._pace.take(seconds, rule.name)
            return written if rule.returns else None
        if rule.makes_zeros:
            # The factory would touch its memory.
            size = args[1] if isinstance(args[0], torch.Tensor) else args[0]
            like = args[0] if isinstance(args[0], torch.Tensor) else torch.empty(0)
            dtype = kwargs.get("dtype") or like.dtype
            return zeros(size, dtype) if math.prod(size) > SMALL else func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and large(first):
            return _like(first, args, kwargs)
        if isinstance(first, (list, tuple)) and any(map(large, first)):
            if rule.joins:
                numel = sum(t.numel() for t in first)
                return zeros([numel // first[0][:1].numel(), *first[0].shape[1:]], first[0].dtype)
            return [zeros(t.shape, t.dtype) for t in first]
        return func(*args, **kwargs)


class _Rule:
    """Writes of an operator of torch, and the tensors that it makes."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        short = schema.name.partition("::")[2]
        base = short.removeprefix("_foreach_").rstrip("_")
        arithmetic = base in _WRITES or short.startswith("_fused_")
        self.returns = bool(schema.returns)
        self.written: Callable[[Any, Any], Any] | None = None
        for index, argument in enumerate(schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and arithmetic:
                self.written = _picker(index, argument.name)
                break
        self._reads_target = base not in ("copy", "fill", "zero") and "out" not in func.__name__
        self.name = base
        self.joins = short == "cat"  # along the first dimension, as torch flattens tensors
        self.fresh = self.written is None and base in (*_FRESH, *_BINARY, "cat")
        self.makes_zeros = short in ("zeros", "new_zeros")
        self.as_usual = self.written is None and not self.fresh and not self.makes_zeros

    def traffic(self, args: Any, written: Sequence[torch.Tensor]) -> int:
        """Returns the bytes that the operator reads and writes."""
        tensors = _tensors(args)
        targets = {id(tensor) for tensor in written}
        read = [t for t in tensors if self._reads_target or id(t) not in targets]
        return sum(tensor.nbytes for tensor in [*read, *written])


def _tensors(args: Any) -> list[torch.Tensor]:
    """Returns the tensors of positional arguments, which are values, tensors or lists of them."""
    tensors = []
    for value in args:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors


def _picker(index: int, name: str) -> Callable[[Any, Any], Any]:
    return lambda args, kwargs: kwargs[name] if name in kwargs else args[index]


def _like(first: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    shape = first.shape
    for other in args[1:]:
        if isinstance(other, torch.Tensor):
            shape = torch.broadcast_shapes(shape, other.shape)
    flat = zeros([math.prod(shape)], kwargs.get("dtype") or first.dtype)
    if shape == first.shape and torch.ops.aten.is_non_overlapping_and_dense(first):
        return flat.as_strided(shape, first.stride())
    return flat.view(shape)
