"""Averages of the parameters at which the gradient is computed; transfers beside both passes."""

from __future__ import annotations

from dear.errors import UserError
from dear.lazy import torch
from dear.training.engine import Update
from dear.training.parameters.engine import SteppedEngine


class CombineThenAdapt(SteppedEngine):
    """Engine with `x <- average(x) - update(gradient at x)`.

    It shares the parameters when the model is about to run in training, and mixes and adapts them
    in `step()`. Both passes hide the transfers.
    """

    def prepare(self) -> None:
        super().prepare()
        self._versions_shared: list[int] = []
        self.hooks.before_forward([self.model], self._before_model)

    def advance(self, update: Update) -> object:
        self._share_if_due()
        averages = bool(self.unmixed)
        if averages and self.exchange.sends_in_place and self._versions() != self._versions_shared:
            raise UserError(
                "parameters were changed between a training forward and step(), while they were "
                "being sent to the neighbours; load or change them after step()"
            )
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
        self._versions_shared = self._versions()
        self.share_all()

    def _versions(self) -> list[int]:
        """Returns the version counters of all parameters, which in-place changes raise."""
        return [param._version for bucket in self.buckets for param in bucket.params]
