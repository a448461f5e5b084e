"""Engines that share all buckets of parameters at the same time, and adapt them in `step()`.

`dear.training.parameters.engine` explains the words share, mix and adapt.
"""

from __future__ import annotations

from dear.buckets.grouping import MIB, fuse, layers
from dear.lazy import torch
from dear.training.engine import Update
from dear.training.hooks import ReaderMap
from dear.training.inflight import InFlight
from dear.training.parameters.engine import ParameterEngine, refuse_writers


class SteppedEngine(ParameterEngine):
    """Base of the engines that share all buckets at the same time, and adapt them in `step()`."""

    def prepare(self) -> None:
        self.members = fuse(layers(self.model, self.params), self.options.bucket_mb * MIB)
        self.exchange.lay_out(self.members, self.steps)
        self.unmixed: set[int] = set()
        """Buckets that are shared but not yet mixed."""
        self.in_flight = InFlight(self.settle)
        self.hooks.before_load(self.model, self._before_load)

    def due(self) -> bool:
        """Returns True if this step averages."""
        return self.steps % self.every == self.every - 1

    def adapt(self, update: Update, *, averages: bool) -> object:
        """Runs the optimizer's step, which the exchange may change."""
        run = self.exchange.adapt if averages else self.exchange.adapt_alone
        return run(lambda: self.scaling.step(update))

    def share_all(self) -> None:
        with torch.no_grad():
            for bucket in self.buckets:
                self.exchange.share(bucket, self.steps)
        self.unmixed = set(range(len(self.buckets)))
        self.exchange.shared()

    def mix(self, index: int) -> None:
        self.unmixed.discard(index)
        self.in_flight.land(self.buckets[index].params)
        # Settling may happen in inference mode, but its tensors must be usable outside.
        with torch.inference_mode(False), torch.no_grad():
            self.exchange.mix(self.buckets[index], self.steps)

    def mix_all(self) -> None:
        """Mixes all shared buckets."""
        if not self.unmixed:
            return
        self.exchange.meet()
        for index in sorted(self.unmixed):
            self.mix(index)
        self.exchange.meet()

    def _before_load(self) -> None:
        if self.exchange.before_load():
            self.unmixed.clear()


class CombineThenAdapt(SteppedEngine):
    """Engine with `x <- average(x) - update(gradient at x)`.

    Parameters are shared when the model is about to run in training, and mixed and adapted in
    `step()`. So the forward and the backward pass hide the transfers.
    """

    when_to_write = "load or change them between step() and the next training forward"

    def prepare(self) -> None:
        refuse_writers(self.model)
        super().prepare()
        self.hooks.before_forward([self.model], self._before_model)

    def advance(self, update: Update) -> object:
        self._share_if_due()
        averages = bool(self.unmixed)
        if averages:
            self.arrived(self.buckets)
        self.mix_all()
        self.steps += 1
        return self.adapt(update, averages=averages)

    def _before_model(self, module: torch.nn.Module) -> None:
        if module.training and torch.is_grad_enabled():
            self._share_if_due()

    def _share_if_due(self) -> None:
        if self.unmixed or not self.due():
            return
        self.begin()
        self.note_sent(self.buckets)
        self.share_all()


class AdaptAndCombine(SteppedEngine):
    """Engine with `x <- average(x - update(gradient at x))`, all in `step()`."""

    def advance(self, update: Update) -> object:
        self.begin()
        averages = self.due()
        result = self.adapt(update, averages=averages)
        if averages:
            self.share_all()
            self.combine()
        self.steps += 1
        return result

    def combine(self) -> None:
        """Mixes the buckets whose values must be current when `step()` returns."""
        self.mix_all()


class AdaptThenCombine(AdaptAndCombine):
    """Engine with `x <- average(x - update(gradient at x))`, averaged before x is read.

    Parameters are adapted and shared in `step()`. Before a module runs, the buckets that it reads
    are mixed. Anything else that reads parameters mixes all buckets first.
    """

    def prepare(self) -> None:
        super().prepare()
        self._readers = ReaderMap(self.model, self.params, self.settle)
        self._readers.set_groups(self.members)
        self.hooks.before_forward(self.model.modules(), self._before_module, self._readers)
        self.hooks.before_state_dict(self.model, self.settle)

    def advance(self, update: Update) -> object:
        self.settle()
        self._readers.freeze()
        return super().advance(update)

    def combine(self) -> None:
        for index in self._readers.unread() & self.unmixed:
            self.mix(index)
        for index in self.unmixed:
            self.in_flight.launch(self.buckets[index].params)

    def settle(self) -> None:
        self.mix_all()

    def close(self) -> None:
        super().close()
        self._readers.freeze()

    def _before_module(self, module: torch.nn.Module) -> None:
        if self.unmixed:
            for index in self._readers.due(module, self.unmixed):
                self.mix(index)
