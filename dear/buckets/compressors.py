"""Gradient compression: its options, and compressors with the state that they keep.

A payload is the compressed gradient that a rank sends. A residual is what a rank has not sent yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

from dear.errors import UserError, unknown
from dear.lazy import torch
from dear.options import LATER, Options, at_least, only_with, option_of

Compression = Literal[
    "none", "fp16", "bf16", "topk", "eftopk", "gaussian", "dgcsampling", "signum", "efsignum"
]
"""Compressions that need a single collective."""
SPARSE = ("topk", "eftopk", "gaussian", "dgcsampling", "gtopk")
"""Compressions that send some elements, with their indices."""
SIGNS = ("signum", "efsignum")
"""Compressions that send one bit per element."""
ERROR_FEEDBACK = ("eftopk", "gaussian", "dgcsampling", "gtopk", "efsignum")
"""Compressions that add what was not sent (the residual) to the next gradient, so that nothing is
lost in a run (arXiv 1809.07599, arXiv 1901.09847). A GradScaler multiplies gradients by a scale.
The residual keeps the scale of the gradients that it comes from, also after the scale changes."""
CORRECTED = ("eftopk", "dgcsampling", "gtopk")
"""Compressions that can keep a velocity per element (momentum correction)."""

DENSITY = 0.001
_SAMPLED, _LEAST_SEEN, _STRIDE = 100, 10, 37
"""`dgcsampling` samples 1 element in `_SAMPLED`; it samples more if fewer than `_LEAST_SEEN` of the
sampled elements would be selected. The first sampled element moves on by `_STRIDE` each step."""
PLACE_BYTES = 4
"""Bytes of the index that travels with each value, as the cost model counts them."""
WARM_UP_FROM = 0.25
"""Density at the start of a warm-up, as in Deep Gradient Compression (arXiv 1712.01887)."""


@dataclass(frozen=True, kw_only=True)
class HalfOptions(Options):
    """Options of algorithms whose only compression sends each element in fewer bits."""

    compression: Literal["none", "fp16", "bf16"] = "none"
    """`fp16`, `bf16`: gradients are sent in 16 bits per element. They are divided by the number of
    ranks before the sum, so that the sum overflows in fp16 only if a gradient does. Parameters keep
    their dtype."""

    def refuse(
        self, params: Sequence[torch.nn.Parameter], groups: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        for param in params if self.compression != "none" else ():
            if not param.is_floating_point():
                raise UserError(
                    f"{option_of(self, 'compression', self.compression)} needs real floating-point "
                    f"gradients, but a parameter of shape {tuple(param.shape)} is {param.dtype}"
                )

    @property
    def wire(self) -> torch.dtype | None:
        """Dtype in which gradients are sent; None: the dtype that they have."""
        if self.compression == "fp16":
            return torch.float16
        return torch.bfloat16 if self.compression == "bf16" else None

    def narrowed(self, gradient: torch.Tensor, size: int) -> torch.Tensor:
        """Returns what a rank sends of `gradient`, in the `wire` dtype: here `gradient / size`.

        Args:
            size: number of ranks.
        """
        return (gradient / size).to(self.wire)

    def mean(self, total: torch.Tensor, size: int) -> torch.Tensor:
        """Returns the mean over ranks, given the sum of what all `size` ranks have sent."""
        return total

    @property
    def gathers(self) -> bool:
        """True if ranks all-gather payloads, since no reduction can sum them."""
        return self.compression in SPARSE + SIGNS

    def share(self, element_size: int) -> float:
        """Returns the bytes sent per byte of gradients, for elements of `element_size` bytes."""
        return self.wire.itemsize / element_size if self.wire else 1.0


@dataclass(frozen=True, kw_only=True)
class CompressedOptions(HalfOptions):
    """Options of algorithms that support every compression."""

    compression: Literal[Compression, "gtopk"] = "none"  # type: ignore[assignment]  # the base's methods know all
    """`fp16`, `bf16`: each element is sent in 16 bits. `topk`: only elements of large magnitude are
    sent. `eftopk`: `topk` with error feedback, which adds what was not sent to the next
    gradient. `gaussian`: `eftopk` with a faster selection, which assumes normally distributed
    elements. `dgcsampling`: `eftopk` with a selection by a sample of the elements, as in Deep
    Gradient Compression. `gtopk`: `eftopk`, and only the largest elements of the sum over ranks are
    applied, as many as each rank selected; ranks find them in pairs, so the number of ranks must be
    a power of 2. `signum`: signs, by majority vote; a GradScaler is an error. `efsignum`: signs
    times the mean magnitude, with error feedback. No checkpoint contains what was not sent."""
    density: float = DENSITY
    """Sparse compressions only: share of the elements that are sent, in (0, 1]; at least one is
    sent."""
    density_warmup_steps: int = 0
    """Sparse compressions only: number of communicated backward passes over which the density falls
    exponentially from 0.25 to `density`. The count starts at 0 whenever an optimizer is
    distributed, also to resume from a checkpoint."""
    momentum_correction: float = field(default=0.0, metadata=LATER)
    """Momentum, in [0, 1), of `eftopk`, `dgcsampling` and `gtopk`: each rank adds its velocity, not
    its gradient, to what was not sent (Deep Gradient Compression, arXiv 1712.01887). The optimizer
    must then have no momentum of its own. Even a single rank compresses then. No checkpoint
    contains the velocity, unlike an optimizer's momentum: it starts at 0 after a resume."""
    factor_masking: bool = field(default=True, metadata=LATER)
    """True: with momentum_correction, elements that were sent lose their velocity."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum_correction < 1:
            what = option_of(self, "momentum_correction")
            raise UserError(f"{what} must lie in [0, 1), got {self.momentum_correction}")
        only_with(self, "momentum_correction", "compression", CORRECTED)
        if not (self.factor_masking or self.momentum_correction):
            raise UserError(f"{option_of(self, 'factor_masking')} needs momentum_correction")
        if not 0 < self.density <= 1:
            raise UserError(f"{option_of(self, 'density')} must lie in (0, 1], got {self.density}")
        at_least(option_of(self, "density_warmup_steps"), self.density_warmup_steps, 0)
        only_with(self, "density", "compression", SPARSE)
        only_with(self, "density_warmup_steps", "compression", SPARSE)
        if self.density_warmup_steps and self.density >= WARM_UP_FROM:
            raise UserError(
                f"{option_of(self, 'density_warmup_steps')} needs a density below {WARM_UP_FROM}, "
                f"where the warm-up begins, got density={self.density}"
            )

    def refuse(
        self, params: Sequence[torch.nn.Parameter], groups: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        super().refuse(params, groups)
        if self.momentum_correction and any(group.get("momentum") for group in groups):
            what = option_of(self, "momentum_correction", self.momentum_correction)
            raise UserError(
                f"{what} applies the momentum itself, and the optimizer would apply it again; make "
                "the optimizer with momentum=0"
            )

    @property
    def alone(self) -> bool:
        return self.momentum_correction > 0

    @property
    def no_scaler(self) -> str | None:
        if self.compression != "signum":
            return None
        return (
            f"{option_of(self, 'compression', self.compression)} turns gradients into 1, 0 and -1, "
            "which a GradScaler must not divide by its scale; train in bfloat16 or float32 without "
            "a scaler, or use compression=efsignum"
        )

    def settling_steps(self) -> int:
        return self.density_warmup_steps

    def density_at(self, step: int) -> float:
        """Returns the density of backward pass `step`; only communicated passes count, from 0."""
        if step >= self.density_warmup_steps:
            return self.density
        fall: float = (self.density / WARM_UP_FROM) ** (step / self.density_warmup_steps)
        return WARM_UP_FROM * fall

    def share(self, element_size: int) -> float:
        if self.compression in SPARSE:
            return self.density * (1 + PLACE_BYTES / element_size)
        return 1 / (8 * element_size) if self.compression in SIGNS else super().share(element_size)


_ROUNDS = 3
ALIGNMENT = 8
"""Parts of a payload start at multiples of this many bytes, so that any dtype can view them."""


class Compressor(ABC):
    """Compresses one flat buffer to bytes and back; may keep state from step to step.

    A rank calls `compress` on its gradients, all-gathers the payloads, calls `decompress` on the
    gathered payloads, and then calls `commit`. Before `commit` nothing counts as sent. So no
    gradient is lost if an error ends a pass or another pass replaces it.

    Args:
        numel, dtype, device: properties of the buffer.
        error_feedback: add what was not sent to the next gradient.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, error_feedback: bool
    ) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        self.residual: torch.Tensor | None = (
            torch.zeros(numel, dtype=dtype, device=device) if error_feedback else None
        )
        """Elements that are not sent yet; None without error feedback."""
        self.velocity: torch.Tensor | None = None
        """Velocity of each element; None without momentum correction."""
        self.momentum, self.masking = 0.0, True
        self.steps = 0
        """Number of calls of `commit`."""
        self._rest: torch.Tensor | None = None
        self._moved: torch.Tensor | None = None
        """Velocities after the last gradient was added."""

    def compress(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the payload for `gradient` (1-D), which is not changed.

        The payload is 1-D uint8; its length is a multiple of 8 bytes and the same on every rank.
        """
        if self.residual is None:
            return self._encode(gradient)
        self._moved = gradient
        if self.velocity is not None:
            self._moved = gradient + self.momentum * self.velocity
        pending = self._moved + self.residual
        finite = self._finite = torch.isfinite(pending).all()
        payload = self._encode(pending)
        self._take_out(payload, pending)
        # An overflowed gradient must not stay in the residual (a GradScaler skips its step).
        self._rest = torch.where(finite, pending, self.residual)
        if self.velocity is not None:
            self._moved = torch.where(finite, self._moved, self.velocity)
        return payload

    @abstractmethod
    def decompress(self, payloads: torch.Tensor, output: torch.Tensor) -> None:
        """Writes the mean over ranks, or an estimate of it, into `output` (1-D).

        Args:
            payloads: `[ranks, bytes]`; each row is a result of `compress`.
        """

    def commit(self, unused: Sequence[slice] = ()) -> None:
        """Counts the last payload as sent: every rank has it; `unused` pieces stay unsent."""
        self.steps += 1
        if self.residual is None or self._rest is None:
            return
        for piece in unused:
            self._rest[piece] = self.residual[piece]
        if self.velocity is not None and self._moved is not None:
            sent = (self._rest == 0) & self._finite & self.masking
            before, self.velocity = self.velocity, self._moved.masked_fill(sent, 0)
            for piece in unused:
                self.velocity[piece] = before[piece]
        self.residual, self._rest = self._rest, None

    @abstractmethod
    def _encode(self, source: torch.Tensor) -> torch.Tensor:
        """Returns the payload for `source`, which does not change."""

    def _take_out(self, payload: torch.Tensor, rest: torch.Tensor) -> None:
        """Removes from `rest` the values that `payload` contains; it was made from `rest`."""
        raise NotImplementedError(f"{type(self).__name__} has no error feedback")


class TopK(Compressor):
    """Selection of the elements of largest magnitude (Aji and Heafield 2017, arXiv 1704.05021).

    Args:
        density: share of the elements that are sent, as a function of the number of `commit` calls.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        density: Callable[[int], float],
        *,
        error_feedback: bool,
    ) -> None:
        super().__init__(numel, dtype, device, error_feedback=error_feedback)
        self._density = density
        self._index_dtype = torch.int32 if numel < 2**31 else torch.int64

    @property
    def count(self) -> int:
        """Number of elements that the next payload carries."""
        return min(max(int(self.numel * self._density(self.steps)), 1), self.numel)

    def _encode(self, source: torch.Tensor) -> torch.Tensor:
        places = self._select(source, self.count)
        return joined(source[places], places.to(self._index_dtype))

    def _select(self, source: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the indices of at most `count` elements, without duplicates."""
        if count == self.numel:
            return torch.arange(count, device=source.device)
        return source.abs().topk(count, sorted=False).indices

    def entries(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values and indices of a payload, `count` of each; a value of 0 is padding."""
        return self._parts(payload)

    def payload(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns a payload with the `count` largest entries; `places` must not repeat."""
        count = self.count
        if values.numel() > count:
            chosen = values.abs().topk(count, sorted=False).indices
            values, places = values[chosen], places[chosen]
        kept, at = values.new_zeros(count), places.new_zeros(count, dtype=self._index_dtype)
        kept[: values.numel()], at[: places.numel()] = values, places.to(self._index_dtype)
        return joined(kept, at)

    def give_back(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """Adds values back to the residual, because other ranks did not apply them."""
        if self._rest is not None:
            # A gradient that has overflowed is not in the residual, so nothing of it goes back.
            self._rest.index_add_(0, places.long(), values.where(self._finite, 0))

    def _take_out(self, payload: torch.Tensor, rest: torch.Tensor) -> None:
        values, places = self._parts(payload)
        # A subtraction would leave nan where the element is infinite. Padding has the value 0 and
        # index 0, and must not clear that element.
        rest[places[values != 0]] = 0

    def decompress(self, payloads: torch.Tensor, output: torch.Tensor) -> None:
        output.zero_()
        for payload in payloads:
            values, places = self._parts(payload)
            # Divided before the sum, which could overflow in half precision.
            output.index_add_(0, places, values, alpha=1 / len(payloads))

    def _parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = self.count
        values, places = split(payload, (count, self.dtype), (count, self._index_dtype))
        return values, places


class Gaussian(TopK):
    """Selects approximately the largest elements, as if they were normally distributed; no sorting.

    The threshold is the normal quantile whose two tails hold `density`, times the standard
    deviation. It is corrected up to 3 times if it selects less than 2/3 or more than 4/3 of `count`
    elements (Shi et al. 2019, arXiv 1911.08772). Exactly `count` entries travel: the largest of the
    selected elements, or all of them and zeros as padding.
    """

    def _select(self, source: torch.Tensor, count: int) -> torch.Tensor:
        if count == self.numel:
            return super()._select(source, count)
        # At least single precision, since a standard deviation in fp16 overflows early.
        wide = source if source.dtype == torch.float64 else source.float()
        deviation = (wide - wide.mean()).abs_()
        limit = self.quantile() * wide.std(correction=0).item()
        for _ in range(_ROUNDS):
            selected = int((~(deviation < limit)).sum())
            if 3 * selected < 2 * count:
                limit *= 0.5
            elif 3 * selected > 4 * count:
                limit *= 1.5
            else:
                break
        # The negated comparison selects nan, too: it must travel to be noticed.
        chosen = (~(deviation < limit)).nonzero().view(-1)
        if chosen.numel() > count:
            chosen = chosen[wide[chosen].abs().topk(count, sorted=False).indices]
        return chosen

    def quantile(self) -> float:
        """Returns the distance from the mean, in standard deviations, at which the tails begin."""
        return NormalDist().inv_cdf(1 - self._density(self.steps) / 2)

    def _encode(self, source: torch.Tensor) -> torch.Tensor:
        count = self.count
        chosen = self._select(source, count)
        values = source.new_zeros(count)
        places = torch.zeros(count, dtype=self._index_dtype, device=source.device)
        values[: chosen.numel()] = source[chosen]
        places[: chosen.numel()] = chosen
        return joined(values, places)


class DgcSampling(Gaussian):
    """Selects approximately the largest elements by a threshold that a sample of them gives.

    Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887) selects in this way. The sample is
    1 element in 100, a different one in each step. A share `density` of the sample reaches the
    threshold. Of all elements that reach it, the largest `count` travel.
    """

    def _select(self, source: torch.Tensor, count: int) -> torch.Tensor:
        share = count / self.numel
        every = max(1, min(_SAMPLED, int(count / _LEAST_SEEN)))
        if every == 1 or count == self.numel:
            return super(Gaussian, self)._select(source, count)
        magnitudes = source.abs()
        sample = magnitudes[self.steps * _STRIDE % every :: every]
        reached = min(sample.numel(), max(1, round(share * sample.numel())))
        limit = sample.topk(reached, sorted=False).values.min()
        chosen = (~(magnitudes < limit)).nonzero().view(-1)
        if chosen.numel() > count:
            chosen = chosen[magnitudes[chosen].topk(count, sorted=False).indices]
        return chosen


class Signum(Compressor):
    """Sends signs; the majority decides (Bernstein et al. 2018, arXiv 1802.04434).

    A 0 counts as positive, and nan as negative. Instead of the mean, the result is 1, -1, or 0 for
    a tied vote. So an overflow on some ranks cannot be seen in the result.
    """

    def _encode(self, source: torch.Tensor) -> torch.Tensor:
        return pack_signs(source)

    def decompress(
        self, payloads: torch.Tensor, output: torch.Tensor, absent: torch.Tensor | None = None
    ) -> None:
        """Writes the majority's signs into `output`.

        Args:
            absent: numbers of ranks, by element, that have sent zeros in place of a gradient and
                do not vote; None: every rank votes.
        """
        votes = torch.zeros(self.numel, dtype=torch.int32, device=output.device)
        for payload in payloads:
            votes += unpack_signs(payload, self.numel)
        if absent is not None:
            votes -= absent  # zeros have counted as positive
        output.copy_(votes.sign_())


class EfSignum(Compressor):
    """Sends signs and the mean magnitude, with error feedback (arXiv 1901.09847)."""

    def _encode(self, source: torch.Tensor) -> torch.Tensor:
        wide = source.dtype if source.dtype == torch.float64 else torch.float32
        scale = source.abs().sum(dtype=wide) / max(self.numel, 1)
        return joined(scale.to(self.dtype).view(1), pack_signs(source))

    def _take_out(self, payload: torch.Tensor, rest: torch.Tensor) -> None:
        scale, signs = self._parts(payload)
        rest.addcmul_(signs, scale, value=-1)

    def decompress(self, payloads: torch.Tensor, output: torch.Tensor) -> None:
        output.zero_()
        for payload in payloads:
            scale, signs = self._parts(payload)
            output.addcmul_(signs, scale / len(payloads))

    def _parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, bits = split(payload, (1, self.dtype), (None, torch.uint8))
        return scale, unpack_signs(bits, self.numel).to(self.dtype)


def make_compressor(
    options: CompressedOptions, numel: int, dtype: torch.dtype, device: torch.device
) -> Compressor:
    """Makes the compressor for one buffer; raises `UserError` for an unknown `compression`."""
    name, feedback = options.compression, options.compression in ERROR_FEEDBACK
    kinds = {
        "topk": TopK,
        "eftopk": TopK,
        "gaussian": Gaussian,
        "dgcsampling": DgcSampling,
        "gtopk": TopK,
    }
    if name in kinds:
        compressor = kinds[name](numel, dtype, device, options.density_at, error_feedback=feedback)
        if options.momentum_correction:
            compressor.momentum = options.momentum_correction
            compressor.masking = options.factor_masking
            compressor.velocity = torch.zeros(numel, dtype=dtype, device=device)
        return compressor
    plain = {"signum": Signum, "efsignum": EfSignum}
    if name not in plain:
        raise unknown("compressor", name, [*kinds, *plain])
    return plain[name](numel, dtype, device, error_feedback=feedback)


def joined(*parts: torch.Tensor) -> torch.Tensor:
    """Concatenates the bytes of 1-D tensors, each padded to a multiple of 8 bytes."""
    pad = torch.nn.functional.pad
    whole = [part.view(torch.uint8) for part in parts]
    return torch.cat([pad(part, (0, -part.numel() % ALIGNMENT)) for part in whole])


def split(payload: torch.Tensor, *parts: tuple[int | None, torch.dtype]) -> list[torch.Tensor]:
    """Returns views of the tensors that `joined` concatenated.

    Args:
        parts: number of elements and dtype of each tensor; None as the number takes all bytes that
            are left, with their padding.
    """
    result, start = [], 0
    for count, dtype in parts:
        nbytes = payload.numel() - start if count is None else count * dtype.itemsize
        result.append(payload[start : start + nbytes].view(dtype))
        start += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return result


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """Packs one bit per element, which is 1 if the element is not negative. Returns 1-D uint8.

    Element i is bit `i % 8` (from the lowest) of byte `i // 8`. Padding fills the last 64 bits.
    """
    bits = (values >= 0).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % (8 * ALIGNMENT)))
    places = torch.arange(8, dtype=torch.uint8, device=values.device)
    return (bits.view(-1, 8) << places).sum(dim=1, dtype=torch.uint8)


def unpack_signs(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns the first `numel` signs of `pack_signs` as int8: 1 or -1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.view(-1, 1) >> shifts) & 1
    return bits.view(-1)[:numel].to(torch.int8).mul_(2).sub_(1)
