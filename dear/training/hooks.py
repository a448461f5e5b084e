"""Hooks into a model's forward and backward pass that can all be taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dear.lazy import torch


class _ModuleHook:
    """A hook that does not travel: copies and pickles of the model carry one that does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _return_nothing, ()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy of its model."""


def _return_nothing() -> Callable[..., None]:
    return _nothing


class Hooks:
    """Registers hooks and removes them all on `remove` (or at the end of a `with` block)."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def on_gradient(
        self, params: Iterable[torch.nn.Parameter], call: Callable[[torch.nn.Parameter], None]
    ) -> None:
        """`call(p)` in each backward pass once `p.grad` holds everything the pass adds to it."""
        for param in params:
            self._handles.append(param.register_post_accumulate_grad_hook(call))

    def before_forward(
        self, modules: Iterable[torch.nn.Module], call: Callable[[torch.nn.Module], None]
    ) -> None:
        """`call(module)` whenever one of `modules` is about to run, in any gradient mode."""
        for module in modules:
            hook = _ModuleHook(lambda module, args: call(module))
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def after_forward(
        self, module: torch.nn.Module, call: Callable[[torch.nn.Module], None]
    ) -> None:
        """`call(module)` whenever `module` has run, also if it raised."""
        hook = _ModuleHook(lambda module, args, output: call(module))
        self._handles.append(module.register_forward_hook(hook, always_call=True))

    def around_forward(
        self,
        module: torch.nn.Module,
        before: Callable[[tuple, dict], tuple[tuple, dict]],
        after: Callable[[Any], Any],
    ) -> None:
        """Lets `before` replace the inputs of `module` and `after` its output."""
        pre = _ModuleHook(lambda module, args, kwargs: before(args, kwargs))
        post = _ModuleHook(lambda module, args, output: after(output))
        self._handles.append(module.register_forward_pre_hook(pre, with_kwargs=True))
        self._handles.append(module.register_forward_hook(post))

    def before_state_dict(self, model: torch.nn.Module, call: Callable[[], None]) -> None:
        """`call()` before any part of `model` gives away or takes in a state dict."""
        hook = _ModuleHook(lambda *args: call())
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(hook))
            self._handles.append(module.register_load_state_dict_pre_hook(hook))

    def before_load(self, model: torch.nn.Module, call: Callable[[], None]) -> None:
        """`call()` before any part of `model` takes in a state dict."""
        hook = _ModuleHook(lambda *args: call())
        for module in model.modules():
            self._handles.append(module.register_load_state_dict_pre_hook(hook))

    def remove(self) -> None:
        """Takes out every hook; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """`call()` when the backward pass that is running has ended, before `backward()` returns.

    The autograd engine's own callback queue, which DDP and FSDP use too.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
