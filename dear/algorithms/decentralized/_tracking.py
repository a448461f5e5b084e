"""Decentralized methods without the bias of plain averaging: they reach the exact optimum.

Plain averaging with a constant step size stops near the optimum, since each rank's own gradient
pulls it away from the mean. These carry a correction from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dear.buckets.updates import with_gradients
from dear.comm.neighbors import Pending
from dear.lazy import torch
from dear.training.combining import AtcEngine, MixingEngine
from dear.training.parameters import refuse_changed_values, versions

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.buckets.flat_values import FlatValues


class Trackers:
    """Estimates `y` of the mean gradient: `y <- average(y) + gradient - last gradient`.

    A parameter that has no gradient on a rank counts as having a zero one there; one that has had
    none anywhere near stays without, so that optimizers leave it alone as in serial training.

    Args:
        estimates: zeroed, one flat buffer for each of `flats`, where `y` shall be.
    """

    def __init__(self, flats: Sequence[FlatValues], estimates: Sequence[torch.Tensor]) -> None:
        self._flats = flats
        self.estimates = estimates
        self._last = [flat.new() for flat in flats]
        self._used: set[Parameter] = set()

    def update(self, update: Callable[[], Any]) -> Any:
        """Takes this rank's gradients in, and calls `update` with the estimates in their place.

        The estimates must have been averaged since the last call.
        """
        gradients: dict[Parameter, torch.Tensor | None] = {}
        with torch.no_grad():
            for flat, estimate, last in zip(self._flats, self.estimates, self._last, strict=True):
                estimate.sub_(last)
                flat.load_gradients(last)
                estimate.add_(last)
                for param, view in zip(flat.params, flat.views(estimate), strict=True):
                    if param.grad is not None or param in self._used or bool(view.any()):
                        self._used.add(param)
                        gradients[param] = view
        return with_gradients(gradients, update)

    def saved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of the estimates and last gradients."""
        pairs = zip(self.estimates, self._last, strict=True)
        return [(estimate.clone(), last.clone()) for estimate, last in pairs]

    def restore(self, saved: Sequence[tuple[torch.Tensor, torch.Tensor]] | None) -> None:
        """Goes on from what `saved` returned; None: from zeros."""
        for index, mine in enumerate(zip(self.estimates, self._last, strict=True)):
            for part, buffer in enumerate(mine):
                buffer.zero_() if saved is None else buffer.copy_(saved[index][part])


class GradientTrackingEngine(MixingEngine):
    """`y <- W y + g - last g; x <- W x - update(y)`: DIGing (Nedic, Olshevsky and Shi 2017).

    Both exchanges start when the model is about to run and are awaited in `step()`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._trackers = Trackers(self.flats, [flat.new() for flat in self.flats])
        self._pending: list[tuple[Pending, Pending]] = []
        self._noted: list[int] = []
        self.before_training_forward(self._start)

    def step(self, update: Callable[[], Any]) -> Any:
        self.refuse_scaler()
        self._start()
        refuse_changed_values(self.flats, self._noted)
        estimates = self._trackers.estimates
        for flat, estimate, pending in zip(self.flats, estimates, self._pending, strict=True):
            pending[0].finish(flat.values)
            flat.touched()
            pending[1].finish(estimate)
        self._pending = []
        self.steps += 1
        return self._trackers.update(update)

    def settle(self) -> None:
        for pair in self._pending:
            for exchange in pair:
                exchange.wait()

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"trackers": self._trackers.saved()}

    def restore(self, saved: dict[str, Any] | None) -> None:
        super().restore(saved)
        self._trackers.restore(None if saved is None else saved["trackers"])

    def _start(self) -> None:
        if self._pending:
            return
        for flat in self.flats:
            flat.reclaim()
        self._noted = versions(self.flats)
        self._pending = [
            (
                self.mixer.start(flat.values, self.steps),
                self.mixer.start(estimate, self.steps),
            )
            for flat, estimate in zip(self.flats, self._trackers.estimates, strict=True)
        ]


class ExactDiffusionEngine(AtcEngine):
    """`psi = x - update; x <- W' (psi + x - last psi)`, W' = (W + 1) / 2 (Yuan et al. 2019).

    The mixer is one of W'. Costs two more copies of the parameters.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._correction = [flat.new() for flat in self.flats]
        """x - last psi; 0 before the first step."""
        self._started = False

    def adapt(self, update: Callable[[], Any]) -> Any:
        self.refuse_scaler()
        with torch.no_grad():
            if self._started:
                for flat, correction in zip(self.flats, self._correction, strict=True):
                    correction.neg_().add_(flat.values)  # held the last psi until now
            self._started = True
            result = update()
            for flat, correction in zip(self.flats, self._correction, strict=True):
                psi = flat.values.clone()
                flat.values.add_(correction)
                correction.copy_(psi)
        return result

    def saved(self) -> dict[str, Any]:
        kept = [correction.clone() for correction in self._correction]
        return super().saved() | {"psi": kept if self._started else None}

    def restore(self, saved: dict[str, Any] | None) -> None:
        super().restore(saved)
        kept = None if saved is None else saved["psi"]
        self._started = kept is not None
        for index, correction in enumerate(self._correction):
            correction.zero_() if kept is None else correction.copy_(kept[index])


class PushDigingEngine(AtcEngine):
    """Gradient tracking over directed graphs: push-DIGing (Nedic, Olshevsky and Shi 2017).

    `u <- C (u + update)`, `v <- C v`, `x = u / v`, `y <- C y + g - last g`, where C lets each rank
    share itself out, so sums over the ranks are kept. The message of a group is u, y and v.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        sizes = [flat.values.numel() for flat in self.flats]
        self._messages = [
            flat.values.new_zeros(2 * size + 1)
            for flat, size in zip(self.flats, sizes, strict=True)
        ]
        self._numerators = [m[:size] for m, size in zip(self._messages, sizes, strict=True)]
        estimates = [m[size:-1] for m, size in zip(self._messages, sizes, strict=True)]
        self._trackers = Trackers(self.flats, estimates)
        self._set_weights([1.0] * len(self.flats))

    def adapt(self, update: Callable[[], Any]) -> Any:
        self.refuse_scaler()
        with torch.no_grad():
            buffers = zip(self.flats, self._numerators, self._messages, strict=True)
            for flat, numerator, message in buffers:
                # x * v + (x after - x before), without a copy of x; and parameters that somebody
                # has loaded or broadcast meanwhile count.
                torch.mul(flat.values, message[-1] - 1, out=numerator)
            result = self._trackers.update(update)
            for flat, numerator in zip(self.flats, self._numerators, strict=True):
                numerator.add_(flat.values)
        return result

    def message(self, index: int) -> torch.Tensor:
        return self._messages[index]

    def arrived(self, index: int) -> None:
        weight = self._messages[index][-1]
        torch.div(self._numerators[index], weight, out=self.flats[index].values)

    def saved(self) -> dict[str, Any]:
        weights = [message[-1].item() for message in self._messages]
        return super().saved() | {"trackers": self._trackers.saved(), "weights": weights}

    def restore(self, saved: dict[str, Any] | None) -> None:
        super().restore(saved)
        self._trackers.restore(None if saved is None else saved["trackers"])
        self._set_weights([1.0] * len(self.flats) if saved is None else saved["weights"])

    def _set_weights(self, weights: Sequence[float]) -> None:
        for message, weight in zip(self._messages, weights, strict=True):
            message[-1] = weight
