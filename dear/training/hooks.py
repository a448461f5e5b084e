"""Hooks into a model's forward and backward pass that can all be taken out again; who reads what.

A module usually reads the parameters it owns. But containers read those of children they never
call (`MultiheadAttention`, `ParameterList`), and code may use another module's weight directly. So
the first forward passes are watched (`ReaderMap`); what they show is added to ownership.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dear.lazy import torch


class _ModuleHook:
    """A hook that does not travel: copies and pickles of the model carry one that does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:  # for deepcopy, too
        return _return_nothing, ()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Remainder of a hook in a copy of its model."""


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

    def adopt(self, others: Hooks) -> None:
        """Takes over the hooks of `others`, which `remove` then removes."""
        self._handles += others._handles
        others._handles = []

    def remove(self) -> None:
        """Takes out every hook; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """`call()` when the backward pass that is running has ended, before `backward()` returns.

    The autograd engine's own callback queue, which DDP and FSDP use too.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


class ReaderMap:
    """Learns until `freeze`, then answers `groups_of(module)` and `unread()`."""

    def __init__(self, model: torch.nn.Module, params: Sequence[torch.nn.Parameter]) -> None:
        self._model = model
        self._group_of: dict[torch.nn.Parameter, int] = dict.fromkeys(params, 0)
        self._called: set[torch.nn.Module] = set()
        self._reads: dict[torch.nn.Module, set[torch.nn.Parameter]] = {}
        self._order: dict[torch.nn.Parameter, None] = {}
        self._running: list[torch.nn.Module] = []
        self._watch: Any = None
        self._learning = Hooks()
        for module in model.modules():
            handles = self._learning
            handles.before_forward([module], self._enter)
            handles.after_forward(module, self._leave)
        self._map: dict[torch.nn.Module, set[int]] | None = None

    def order(self) -> list[torch.nn.Parameter]:
        """The parameters as they were first read, or the modules that own them first ran."""
        return list(self._order)

    def set_groups(self, groups: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        """Says which parameters belong together from now on."""
        self._group_of = {param: i for i, group in enumerate(groups) for param in group}
        self._map = None

    def modules(self) -> list[torch.nn.Module]:
        """Modules that may read parameters, or hold some that do."""
        return [
            module
            for module in self._model.modules()
            if module in self._reads or any(p in self._group_of for p in module.parameters())
        ]

    def freeze(self) -> None:
        """Ends learning. A second call does nothing."""
        self._learning.remove()
        self._running.clear()
        self._stop_watching()

    def due(self, module: torch.nn.Module, pending: set[int]) -> list[int]:
        """Which of the `pending` groups must be current before `module` runs, which it is about to.

        In an evaluation it is all of them: that may read parameters where training never does.
        """
        if module not in self._called:  # then others stand for less
            self._called.add(module)
            self._map = None
        training = self._model.training and torch.is_grad_enabled()
        return sorted(self.groups_of(module) & pending if training else pending)

    def groups_of(self, module: torch.nn.Module) -> set[int]:
        """Groups that must be current before `module` runs."""
        return self._readers().get(module, set())

    def unread(self) -> set[int]:
        """Groups with a parameter that no module known to run stands for."""
        self._readers()
        return self._unread

    def _readers(self) -> dict[torch.nn.Module, set[int]]:
        if self._map is None:
            self._map = {
                module: {self._group_of[param] for param in read}
                for module, read in self._reads.items()
            }
            self._standing: set[torch.nn.Parameter] = set()
            self._stand_in(self._model, None)
            self._unread = {
                group for param, group in self._group_of.items() if param not in self._standing
            }
        return self._map

    def _stand_in(self, module: torch.nn.Module, nearest: torch.nn.Module | None) -> None:
        # A module that is never called is read by the nearest one around it that is.
        if module in self._called:
            nearest = module
        if nearest is not None:
            for param in module.parameters(recurse=False):
                if param in self._group_of:
                    self._map.setdefault(nearest, set()).add(self._group_of[param])
                    self._standing.add(param)
        for child in module.children():
            self._stand_in(child, nearest)

    def _enter(self, module: torch.nn.Module) -> None:
        self._running.append(module)
        self._called.add(module)
        for param in module.parameters(recurse=False):
            if param in self._group_of:
                self._order.setdefault(param)
        if self._watch is None:
            self._watch = _watcher(self._read)
            self._watch.__enter__()

    def _leave(self, module: torch.nn.Module) -> None:
        while self._running and self._running.pop() is not module:
            pass
        if not self._running:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None

    def _read(self, param: Any) -> None:
        if self._running and param in self._group_of:
            self._reads.setdefault(self._running[-1], set()).add(param)
            self._order.setdefault(param)
            self._map = None


# What may be asked of a parameter without reading a value of it.
_ASKING = frozenset(
    """dim element_size empty_like full_like get_device has_names is_complex is_contiguous
    is_floating_point is_inference is_pinned is_shared is_signed ndimension nelement new_empty
    new_empty_strided new_full new_ones new_tensor new_zeros numel ones_like rand_like randint_like
    randn_like register_hook size storage_offset stride zeros_like""".split()  # noqa: SIM905
)
# Properties that are tensors of the same memory.
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def reads_values(func: Any) -> bool:
    """True unless the torch function `func` tells of a tensor's shape, type and the like only."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _VIEWS
    return name not in _ASKING


def _watcher(seen: Any) -> Any:
    """A torch function mode that reports every parameter whose values a torch function reads."""

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            kwargs = kwargs or {}
            if reads_values(func):
                for value in (*args, *kwargs.values()):
                    for item in value if isinstance(value, (list, tuple)) else (value,):
                        if isinstance(item, torch.nn.Parameter):
                            seen(item)
            return func(*args, **kwargs)

    return Watch()
