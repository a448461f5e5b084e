"""Torch's ZeroRedundancyOptimizer behind the optimizer that the training script has."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dear.buckets.sharding import has_hooks, run_hooks
from dear.errors import UserError
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator


class ZeroUpdate:
    """Each rank updates some of the parameters, holds the state of those, and sends them on.

    Hyper-parameters are those of the script's optimizer at the time of each step. Its own `state`
    is empty meanwhile; `whole_state` collects it.

    Args:
        optimizer: of its own, plain class yet.

    Raises:
        UserError: the optimizer or its parameters are of a kind that ZeRO cannot split.
    """

    def __init__(self, optimizer: Optimizer, communicator: Communicator) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                "option of ddp 'zero' cannot be had with LBFGS, which needs all parameters at "
                "once; use zero=False"
            )
        self._optimizer: Any = optimizer
        self._communicator = communicator
        try:
            self._zero = ZeroRedundancyOptimizer(
                [dict(group) for group in optimizer.param_groups],
                optimizer_class=self._local,
                process_group=communicator.groups[0],
            )
        except ValueError as error:
            raise UserError(
                f"option of ddp 'zero': torch's ZeroRedundancyOptimizer refuses this "
                f"optimizer: {error}"
            ) from None
        self.take_state()

    def _local(self, groups: Sequence[dict[str, Any]], **_: Any) -> Optimizer:
        """An optimizer of the same kind, whatever its class wants to be made with."""
        local = object.__new__(type(self._optimizer))
        # A scheduler's wrapper of `step` is about the script's optimizer, and so are its hooks.
        local.__dict__.update({k: v for k, v in vars(self._optimizer).items() if k != "step"})
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(local, name, OrderedDict())
        local.param_groups = [dict(group) for group in groups]
        local.state = defaultdict(dict)
        return local

    def step(self) -> Any:
        """One update from the gradients there are, with the optimizer's step hooks around it."""
        if has_hooks(self._optimizer):
            return run_hooks(self._optimizer, self._step)
        return self._step()

    def _step(self) -> Any:
        ours, given = self._zero.param_groups, self._optimizer.param_groups
        _copy_settings(given, ours)
        result = self._zero.step()
        _copy_settings(ours, given)  # some optimizers count there
        return result

    def take_state(self) -> None:
        """Takes this rank's part of the optimizer's own, whole state; the rest is let go."""
        mine = {param for group in self._zero.optim.param_groups for param in group["params"]}
        whole = self._optimizer.state
        self._zero.optim.state.update({p: state for p, state in whole.items() if p in mine})
        whole.clear()

    def whole_state(self) -> dict[Any, Any]:
        """Everybody's state, on every rank; a collective call."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        place = {param: i for i, param in enumerate(params)}
        mine = {place[param]: state for param, state in self._zero.optim.state.items() if state}
        result = {}
        for part in self._communicator.gather_objects(mine):
            for index, state in part.items():
                result[params[index]] = {
                    key: _beside(value, params[index]) for key, value in state.items()
                }
        return result


def _copy_settings(source: Sequence[dict[str, Any]], to: Sequence[dict[str, Any]]) -> None:
    for one, other in zip(source, to, strict=True):
        other.update({key: value for key, value in one.items() if key != "params"})


def _beside(value: Any, param: Any) -> Any:
    # Objects of other ranks come on their devices; counters stay on the CPU, as torch has them.
    if torch.is_tensor(value) and value.device.type != "cpu":
        return value.to(param.device)
    return value
