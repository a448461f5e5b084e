"""Averages of updated parameters, either in `step()` or until a module reads them."""

from __future__ import annotations

from dear.lazy import torch
from dear.training.engine import Update
from dear.training.hooks import ReaderMap
from dear.training.parameters.engine import SteppedEngine


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
        """Mixes the buckets that must be current when `step()` returns."""
        self.mix_all()


class AdaptThenCombine(AdaptAndCombine):
    """Engine with `x <- average(x - update(gradient at x))`, averaged when it is read.

    It adapts and shares the parameters in `step()`. A module that is about to run mixes the buckets
    that it reads. Everything else that reads parameters mixes all buckets.
    """

    def prepare(self) -> None:
        super().prepare()
        self._readers = ReaderMap(self.model, self.params)
        self._readers.set_groups(self.members)
        self.hooks.before_forward(self.model.modules(), self._before_module)
        self.hooks.before_state_dict(self.model, self.settle)

    def advance(self, update: Update) -> object:
        self.settle()
        self._readers.freeze()
        return super().advance(update)

    def combine(self) -> None:
        for index in self._readers.unread() & self.unmixed:
            self.mix(index)

    def settle(self) -> None:
        self.mix_all()

    def close(self) -> None:
        super().close()
        self._readers.freeze()

    def _before_module(self, module: torch.nn.Module) -> None:
        if self.unmixed:
            for index in self._readers.due(module, self.unmixed):
                self.mix(index)
