"""Fewer bytes for a gradient: the options, what travels instead, and what is kept of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from dear.errors import UserError, unknown
from dear.lazy import torch
from dear.options import Options, at_least, only_with, option_of

Compression = Literal[
    "none", "fp16", "bf16", "topk", "eftopk", "gaussian", "dgcsampling", "signum", "efsignum"
]
"""What can be done with a gradient by one collective."""
SPARSE = ("topk", "eftopk", "gaussian", "dgcsampling", "gtopk")
"""Some elements travel, with their places."""
SIGNS = ("signum", "efsignum")
"""One bit per element travels."""
ERROR_FEEDBACK = ("eftopk", "gaussian", "dgcsampling", "gtopk", "efsignum")
"""What does not travel is added to the next gradient, so that nothing is lost (Stich et al. 2018,
arXiv 1809.07599; Karimireddy et al. 2019, arXiv 1901.09847)."""

DENSITY = 0.001
_SAMPLED, _LEAST_SEEN, _STRIDE = 100, 10, 37
"""One element in so many is in the sample of `dgcsampling`; fewer are left out where the sample
would have less than ten of the largest; and where it begins moves on by so many each step."""
PLACE_BYTES = 4
"""The place of an element that travels, besides its value."""
WARM_UP_FROM = 0.25
"""Density with which a warm-up begins, as in Deep Gradient Compression (arXiv 1712.01887)."""


@dataclass(frozen=True, kw_only=True)
class HalfOptions(Options):
    """For algorithms that can only make each element smaller."""

    compression: Literal["none", "fp16", "bf16"] = "none"
    """`fp16`, `bf16`: gradients travel in 16 bits per element, divided by the number of ranks
    before the sum, so that fp16 overflows no sooner than the gradient itself; everything else stays
    in its own type."""

    def refuse(self, params: Sequence[torch.nn.Parameter]) -> None:
        for param in params if self.compression != "none" else ():
            if not param.is_floating_point():
                raise UserError(
                    f"{option_of(self, 'compression')}={self.compression!r} is for real "
                    f"floating-point gradients; a parameter of shape {tuple(param.shape)} is "
                    f"{param.dtype}"
                )

    @property
    def wire(self) -> torch.dtype | None:
        """The type in which gradients travel, None if it is their own."""
        name = {"fp16": "float16", "bf16": "bfloat16"}.get(self.compression)
        return getattr(torch, name) if name else None

    def narrowed(self, gradient: torch.Tensor, size: int) -> torch.Tensor:
        """What travels of a rank's gradient in a smaller type, with `size` ranks: its part of the
        mean."""
        return (gradient / size).to(self.wire)

    @property
    def gathers(self) -> bool:
        """True if ranks gather each other's payloads, which no reduction can add up."""
        return self.compression in SPARSE + SIGNS

    def share(self, element_size: int) -> float:
        """Bytes that a rank sends per byte of gradients with elements of `element_size` bytes."""
        return self.wire.itemsize / element_size if self.wire else 1.0


@dataclass(frozen=True, kw_only=True)
class CompressedOptions(HalfOptions):
    """For algorithms that can carry everything."""

    compression: Literal[Compression, "gtopk"] = "none"
    """`fp16`, `bf16`: gradients travel in 16 bits per element. `topk`: the elements of largest
    magnitude. `eftopk`: the same, and the rest is added to the next gradient. `gaussian`: as
    `eftopk`, found faster, as if elements were normally distributed. `dgcsampling`: the same by a
    sample of the elements, as Deep Gradient Compression does. `gtopk`: as `eftopk`, and of the sum
    of what ranks have chosen the largest elements, as many as one rank has chosen, found by pairs
    of ranks; for a number of them that is a power of 2. `signum`: signs, by majority
    vote. `efsignum`: signs times the mean magnitude, and the rest is added to the next gradient."""
    density: float = DENSITY
    """Where elements are chosen: share of the elements that travel, in (0, 1]; at least one
    does."""
    density_warmup_steps: int = 0
    """Where elements are chosen: the density falls exponentially from 0.25 to `density` over so
    many communicated backward passes."""

    def __post_init__(self) -> None:
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

    def settling_steps(self) -> int:
        return self.density_warmup_steps

    def density_at(self, step: int) -> float:
        """The density of communicated pass `step`, counted from 0."""
        if step >= self.density_warmup_steps:
            return self.density
        return WARM_UP_FROM * (self.density / WARM_UP_FROM) ** (step / self.density_warmup_steps)

    def share(self, element_size: int) -> float:
        if self.compression in SPARSE:
            return self.density * (1 + PLACE_BYTES / element_size)
        return 1 / (8 * element_size) if self.compression in SIGNS else super().share(element_size)


_ROUNDS = 3
ALIGNMENT = 8
"""Parts start at multiples of so many bytes, so that they can be viewed as any type."""


class Compressor(ABC):
    """Turns one flat buffer into bytes and back; one object per buffer, for it may keep state.

    A rank calls `compress` on its own gradients, all-gathers the payloads, calls `decompress` on
    what it has got and then `commit`. Without `commit` it is as if nothing had been sent: what a
    pass that an error ended, or that another one superseded, has compressed is never lost.

    Args:
        numel, dtype, device: of the buffer.
        error_feedback: what does not travel is added to the next gradient.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, error_feedback: bool
    ) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        self.residual: torch.Tensor | None = (
            torch.zeros(numel, dtype=dtype, device=device) if error_feedback else None
        )
        """What has not travelled yet; None without error feedback."""
        self.steps = 0
        """How often `commit` has been called."""
        self._rest: torch.Tensor | None = None

    def compress(self, gradient: torch.Tensor) -> torch.Tensor:
        """The payload for a 1-D `gradient`, which stays as it is.

        Returns:
            1-D uint8, of the same length on every rank, a multiple of 8 bytes.
        """
        if self.residual is None:
            return self._encode(gradient)
        rest = gradient + self.residual
        whole = torch.isfinite(rest).all()
        payload = self._encode(rest)
        self._take_out(payload, rest)
        # A gradient that has overflowed must not stay for ever (a GradScaler skips its step).
        self._rest = torch.where(whole, rest, self.residual)
        return payload

    @abstractmethod
    def decompress(self, payloads: torch.Tensor, output: torch.Tensor) -> None:
        """Writes the mean over ranks, or what stands for it, into `output`, 1-D.

        Args:
            payloads: `[ranks, bytes]`, rows of what `compress` returned.
        """

    def commit(self, unused: Sequence[slice] = ()) -> None:
        """The last payload has been taken in by every rank; without its `unused` pieces."""
        self.steps += 1
        if self.residual is None or self._rest is None:
            return
        for piece in unused:
            self._rest[piece] = self.residual[piece]
        self.residual, self._rest = self._rest, None

    @abstractmethod
    def _encode(self, source: torch.Tensor) -> torch.Tensor:
        """The payload for `source`, which stays as it is."""

    def _take_out(self, payload: torch.Tensor, rest: torch.Tensor) -> None:
        """Takes from `rest`, of which `payload` was made, what the payload carries."""
        raise NotImplementedError(f"{type(self).__name__} has no error feedback")


class TopK(Compressor):
    """The elements of largest magnitude (Aji and Heafield 2017, arXiv 1704.05021).

    Args:
        density: share of the elements that travel, by the number of `commit` calls before.
    """

    def __init__(
        self, numel: int, dtype: Any, device: Any, density: Callable[[int], float], **feedback: bool
    ) -> None:
        super().__init__(numel, dtype, device, **feedback)
        self._density = density
        self._index_dtype = torch.int32 if numel < 2**31 else torch.int64

    @property
    def count(self) -> int:
        """How many elements travel the next time."""
        return min(max(int(self.numel * self._density(self.steps)), 1), self.numel)

    def _encode(self, source: torch.Tensor) -> torch.Tensor:
        places = self._select(source, self.count)
        return joined(source[places], places.to(self._index_dtype))

    def _select(self, source: torch.Tensor, count: int) -> torch.Tensor:
        """Places of `count` elements at most; the same place is never chosen twice."""
        if count == self.numel:
            return torch.arange(count, device=source.device)
        return source.abs().topk(count, sorted=False).indices

    def entries(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and places that a payload carries, `count` of each; a value of 0 is padding."""
        return self._parts(payload)

    def payload(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """One of the `count` largest of these entries, whose places differ."""
        count, device = self.count, values.device
        if values.numel() > count:
            chosen = values.abs().topk(count, sorted=False).indices
            values, places = values[chosen], places[chosen]
        found, at = values.new_zeros(count), torch.zeros(count, dtype=self._index_dtype).to(device)
        found[: values.numel()], at[: places.numel()] = values, places.to(self._index_dtype)
        return joined(found, at)

    def give_back(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """What the last payload carried there has not been taken in; it is kept for the next."""
        if self._rest is not None:
            self._rest.index_add_(0, places.long(), values)

    def _take_out(self, payload: torch.Tensor, rest: torch.Tensor) -> None:
        values, places = self._parts(payload)
        # Not a difference, which would leave nan where the element is infinite; and not where the
        # payload is padded.
        rest[places[values != 0]] = 0

    def decompress(self, payloads: torch.Tensor, output: torch.Tensor) -> None:
        output.zero_()
        for payload in payloads:
            values, places = self._parts(payload)
            # Divided before the sum, which half precision could not hold.
            output.index_add_(0, places, values, alpha=1 / len(payloads))

    def _parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = self.count
        return split(payload, (count, self.dtype), (count, self._index_dtype))


class Gaussian(TopK):
    """About the largest elements, without sorting: those in the tails of a normal distribution.

    The threshold is the normal quantile whose two tails hold `density`, times the standard
    deviation; it is corrected up to 3 times when it finds less than 2/3 or more than 4/3 of the
    count (Shi et al. 2019, arXiv 1911.08772). Exactly `count` entries travel: the largest of those
    found, or all of them and zeros.
    """

    def _select(self, source: torch.Tensor, count: int) -> torch.Tensor:
        if count == self.numel:
            return super()._select(source, count)
        # In single precision at least: a standard deviation in fp16 overflows early.
        wide = source if source.dtype == torch.float64 else source.float()
        away = (wide - wide.mean()).abs_()
        limit = self.quantile() * wide.std(correction=0).item()
        for _ in range(_ROUNDS):
            found = int((~(away < limit)).sum())
            if 3 * found < 2 * count:
                limit *= 0.5
            elif 3 * found > 4 * count:
                limit *= 1.5
            else:
                break
        # Not `>=`: what is not a number must travel, to be noticed.
        chosen = (~(away < limit)).nonzero().view(-1)
        if chosen.numel() > count:
            chosen = chosen[wide[chosen].abs().topk(count, sorted=False).indices]
        return chosen

    def quantile(self) -> float:
        """How many standard deviations from the mean the two tails of `density` begin."""
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
    """About the largest elements, by the magnitudes of a sample: Deep Gradient Compression's way
    (Lin et al. 2018, arXiv 1712.01887).

    The threshold is the largest that `density` of the sample reach, and the sample is one element
    in 100, others in each step. Of what is found the largest `count` travel.
    """

    def _select(self, source: torch.Tensor, count: int) -> torch.Tensor:
        share = count / self.numel
        every = max(1, min(_SAMPLED, int(count / _LEAST_SEEN)))
        if every == 1 or count == self.numel:
            return super(Gaussian, self)._select(source, count)
        magnitudes = source.abs()
        sample = magnitudes[self.steps * _STRIDE % every :: every]
        seen = min(sample.numel(), max(1, round(share * sample.numel())))
        limit = sample.topk(seen, sorted=False).values.min()
        chosen = (~(magnitudes < limit)).nonzero().view(-1)
        if chosen.numel() > count:
            chosen = chosen[magnitudes[chosen].topk(count, sorted=False).indices]
        return chosen


class Signum(Compressor):
    """Signs by majority vote (Bernstein et al. 2018, arXiv 1802.04434); 0 counts as positive.

    What stands for the mean is 1, -1, or 0 where the votes are equal.
    """

    def _encode(self, source: torch.Tensor) -> torch.Tensor:
        return pack_signs(source)

    def decompress(self, payloads: torch.Tensor, output: torch.Tensor) -> None:
        votes = torch.zeros(self.numel, dtype=torch.int32, device=output.device)
        for payload in payloads:
            votes += unpack_signs(payload, self.numel)
        output.copy_(votes.sign_())


class EfSignum(Compressor):
    """Signs times the mean magnitude, with error feedback (arXiv 1901.09847)."""

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
    """A compressor for one buffer; raises `UserError` if none has the name in `options`."""
    name, feedback = options.compression, options.compression in ERROR_FEEDBACK
    kinds = {
        "topk": TopK,
        "eftopk": TopK,
        "gaussian": Gaussian,
        "dgcsampling": DgcSampling,
        "gtopk": TopK,
    }
    if name in kinds:
        return kinds[name](numel, dtype, device, options.density_at, error_feedback=feedback)
    plain = {"signum": Signum, "efsignum": EfSignum}
    if name not in plain:
        raise unknown("compressor", name, [*kinds, *plain])
    return plain[name](numel, dtype, device, error_feedback=feedback)


def joined(*parts: torch.Tensor) -> torch.Tensor:
    """The bytes of 1-D tensors one after another, each padded to a multiple of 8."""
    pad = torch.nn.functional.pad
    whole = [part.view(torch.uint8) for part in parts]
    return torch.cat([pad(part, (0, -part.numel() % ALIGNMENT)) for part in whole])


def split(payload: torch.Tensor, *parts: tuple[int | None, torch.dtype]) -> list[torch.Tensor]:
    """What `joined` has joined, as views.

    Args:
        parts: the number of elements and the type of each; None: all that are left, with padding.
    """
    result, start = [], 0
    for count, dtype in parts:
        nbytes = payload.numel() - start if count is None else count * dtype.itemsize
        result.append(payload[start : start + nbytes].view(dtype))
        start += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return result


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """One bit per element, set where it is not negative; padded to a multiple of 64 bits.

    Element i is bit `i % 8` (from the lowest) of byte `i // 8`.
    """
    bits = (values >= 0).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % (8 * ALIGNMENT)))
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=values.device)
    return (bits.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)


def unpack_signs(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """The first `numel` signs of `pack_signs` as int8: 1 or -1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.view(-1, 1) >> shifts) & 1
    return bits.view(-1)[:numel].to(torch.int8).mul_(2).sub_(1)
