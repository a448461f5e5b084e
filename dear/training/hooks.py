"""Hooks into a model's forward and backward pass, and the modules that read each parameter.

A module usually reads the parameters that it owns. But a container may read the parameters of a
child that is never called (`MultiheadAttention`, `ParameterList`), and code may use another
module's weight directly. So `ReaderMap` watches the first forward passes and adds what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, cast

from dear.errors import UserError
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

P = ParamSpec("P")
R = TypeVar("R")


class _ModuleHook(Generic[P, R]):
    """Hook for this process only: in copies and pickles of the model it does nothing.

    `torch.compile` traces the hooks of the modules that it compiles. It leaves its graph for a hook
    on the outermost module of a compiled region, and drops the hooks of modules inside.

    Args:
        inside: called at most once, while `torch.compile` traces the hook; returns True if the
            module is inside a region, so that `call` is left out from now on. None: it never is.
    """

    def __init__(self, call: Callable[P, R], inside: Callable[[], bool] | None = None) -> None:
        self._call = call
        self._traced = torch.compiler.is_compiling
        self._outside = _outside_graphs()
        self._omits = torch.compiler.assume_constant_result(inside or _never)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if not self._traced():
            return self._call(*args, **kwargs)
        return None if self._omits() else cast(R, self._outside(self._call, *args, **kwargs))

    def __reduce__(self) -> tuple[type[object], tuple[Callable[..., None]]]:  # for deepcopy, too
        return _ModuleHook, (_nothing,)


@cache
def _outside_graphs() -> Callable[..., object]:
    """Returns an untraced function that calls its first argument with the other arguments."""

    def run(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return call(*args, **kwargs)

    untraced: Callable[..., object] = torch.compiler.disable(run)
    return untraced


def _never() -> bool:
    return False


def _nothing(*args: object, **kwargs: object) -> None:
    """Does nothing; replaces this project's hooks in copies of a model."""


class _GradientHook(partial[None]):
    """Hook of this project on a gradient."""


def refuse_later_hooks(params: Iterable[torch.nn.Parameter]) -> None:
    """Raises `UserError` if the script has registered a gradient hook after this project's hooks,
    which send the gradient."""
    for param in params:
        hooks = param._post_accumulate_grad_hooks
        if hooks and not isinstance(next(reversed(hooks.values())), _GradientHook):
            raise UserError(
                "register_post_accumulate_grad_hook() was called on a parameter of shape "
                f"{tuple(param.shape)} after the optimizer was distributed, so gradients are sent "
                "before the hook runs; register it before, or close() the optimizer and wrap it "
                "again"
            )


class Hooks:
    """Registers hooks, and removes them on `remove` or at the end of a `with` block."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def on_gradient(
        self, params: Iterable[torch.nn.Parameter], call: Callable[[torch.nn.Parameter], None]
    ) -> None:
        """Calls `call(p)` in each backward pass, once `p.grad` is complete in this pass."""
        for param in params:
            self._handles.append(param.register_post_accumulate_grad_hook(_GradientHook(call)))

    def before_forward(
        self,
        modules: Iterable[torch.nn.Module],
        call: Callable[[torch.nn.Module], None],
        readers: ReaderMap | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Calls `call(module)` whenever one of `modules` is about to run, in any gradient mode.

        Args:
            readers: if given, leave out the call for modules inside a compiled region.
            last: run after the hooks that exist already; otherwise before them.
        """
        for module in modules:
            inside = None if readers is None else readers.inside(module)
            hook = _ModuleHook(lambda module, args: call(module), inside)
            self._handles.append(module.register_forward_pre_hook(hook, prepend=not last))

    def after_forward(
        self,
        module: torch.nn.Module,
        call: Callable[[torch.nn.Module], None],
        readers: ReaderMap | None = None,
        *,
        raised: bool = False,
    ) -> None:
        """Calls `call(module)` whenever `module` has run.

        Args:
            readers: as for `before_forward`.
            raised: call it also if the module raised. Not for modules that may be in a compiled
                region: torch would compile each of them separately, up to its limit of 8.
        """
        inside = None if readers is None else readers.inside(module)
        hook = _ModuleHook(lambda module, args, output: call(module), inside)
        self._handles.append(module.register_forward_hook(hook, always_call=raised))

    def around_forward(
        self,
        module: torch.nn.Module,
        before: Callable[
            [tuple[object, ...], dict[str, object]], tuple[object, dict[str, object]] | None
        ],
        after: Callable[[object], object],
    ) -> None:
        """Lets `before` replace the inputs of `module`, and `after` its output."""
        pre = _ModuleHook(lambda module, args, kwargs: before(args, kwargs))
        post = _ModuleHook(lambda module, args, output: after(output))
        self._handles.append(module.register_forward_pre_hook(pre, with_kwargs=True))
        self._handles.append(module.register_forward_hook(post))

    def before_state_dict(self, model: torch.nn.Module, call: Callable[[], None]) -> None:
        """Calls `call()` before any module of `model` saves or loads a state dict."""
        self.before_load(model, call)
        hook = _ModuleHook(lambda *args: call())
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(hook))

    def before_load(self, model: torch.nn.Module, call: Callable[[], None]) -> None:
        """Calls `call()` before any module of `model` loads a state dict."""
        hook = _ModuleHook(lambda *args: call())
        for module in model.modules():
            self._handles.append(module.register_load_state_dict_pre_hook(hook))

    def after_load(self, model: torch.nn.Module, replaced: Callable[[], None]) -> None:
        """Calls `replaced()` if loading a state dict has given a module new parameter objects."""
        for module in model.modules():
            before = {
                name: param for name, param in module._parameters.items() if param is not None
            }
            if before:
                hook = _ModuleHook(partial(_compare, before, replaced))
                self._handles.append(module.register_load_state_dict_post_hook(hook))

    def remove(self) -> None:
        """Takes out every hook; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()


def _compare(
    before: Mapping[str, torch.nn.Parameter],
    replaced: Callable[[], None],
    module: torch.nn.Module,
    keys: object,
) -> None:
    """Calls `replaced()` if a parameter of the module is another object than before."""
    if any(module._parameters.get(name, param) is not param for name, param in before.items()):
        replaced()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls `call()` when the current backward pass has ended, before `backward()` returns.

    Uses autograd's own callback queue, as DDP and FSDP do.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


class ReaderMap:
    """Map from modules to the parameters that they read; complete after `freeze`.

    Hooks of modules inside a compiled region do not run. What such a module reads is attributed to
    the border: the outermost module of the region (the model, or a module compiled by itself).

    Args:
        settle: makes all parameters current.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        params: Sequence[torch.nn.Parameter],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self._settle = settle
        self._compiled = any(map(_is_compiled, model.modules()))
        """True once some hooks do not run."""
        self._group_of: dict[torch.nn.Parameter, int] = dict.fromkeys(params, 0)
        self._called: set[torch.nn.Module] = set()
        self._reads: dict[torch.nn.Module, set[torch.nn.Parameter]] = {}
        self._order: dict[torch.nn.Parameter, None] = {}
        self._running: list[torch.nn.Module] = []
        self._watch: AbstractContextManager[object] | None = None
        self._learning = Hooks()
        for module in model.modules():
            handles = self._learning
            handles.before_forward([module], self._enter, self)
            # After an error, the model's own call leaves the modules in it, too.
            handles.after_forward(module, self._leave, self, raised=module is model)
        self._map: dict[torch.nn.Module, set[int]] | None = None

    def inside(self, module: torch.nn.Module) -> Callable[[], bool]:
        """Returns a function to call while `module` is compiled. It notes the compilation, and
        returns True if `module` is inside a compiled region."""

        def inside() -> bool:
            if not self._compiled:
                self._compiled, self._map = True, None
                self._settle()
            return not self._at_border(module)

        return inside

    def order(self) -> list[torch.nn.Parameter]:
        """Returns the parameters in the order in which they were first read, or in which the
        modules that own them first ran."""
        return list(self._order)

    def set_groups(self, groups: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        """Sets which parameters belong together from now on."""
        self._group_of = {param: i for i, group in enumerate(groups) for param in group}
        self._map = None

    def modules(self) -> list[torch.nn.Module]:
        """Returns the modules that may read parameters, or contain a module that may."""
        return [
            module
            for module in self.model.modules()
            if module in self._reads or any(p in self._group_of for p in module.parameters())
        ]

    def freeze(self) -> None:
        """Ends the watch of forward passes. A second call does nothing."""
        self._learning.remove()
        self._running.clear()
        self._stop_watching()

    def due(self, module: torch.nn.Module, pending: set[int]) -> list[int]:
        """Returns the groups out of `pending` that must be current before `module` runs.

        In an evaluation, all of `pending`: it may read parameters that training never reads.
        """
        if module not in self._called:  # modules around it then answer for fewer parameters
            self._called.add(module)
            self._map = None
        training = self.model.training and torch.is_grad_enabled()
        return sorted(self.groups_of(module) & pending if training else pending)

    def groups_of(self, module: torch.nn.Module) -> set[int]:
        """Returns the groups that must be current before `module` runs."""
        return self._readers().get(module, set())

    def unread(self) -> set[int]:
        """Returns the groups with a parameter that no module is known to read."""
        self._readers()
        return self._unread

    def _readers(self) -> dict[torch.nn.Module, set[int]]:
        if self._map is None:
            readers = {
                module: {self._group_of[param] for param in read}
                for module, read in self._reads.items()
            }
            standing: set[torch.nn.Parameter] = set()

            def stand_in(
                module: torch.nn.Module,
                nearest: torch.nn.Module | None,
                border: torch.nn.Module | None,
            ) -> None:
                # For a module that is never called, the nearest called module around it reads.
                if module in self._called:
                    nearest = module
                    if not self._compiled or self._at_border(module):
                        border = module
                read = {p for p in module.parameters(recurse=False) if p in self._group_of}
                if border is not nearest:
                    read |= self._reads.get(module, set())
                for reader in (nearest, border):
                    if reader is not None:
                        readers.setdefault(reader, set()).update(self._group_of[p] for p in read)
                if border is not None:
                    standing.update(read)
                for child in module.children():
                    stand_in(child, nearest, border)

            stand_in(self.model, None, None)
            self._unread = {
                group for param, group in self._group_of.items() if param not in standing
            }
            self._map = readers
        return self._map

    def _at_border(self, module: torch.nn.Module) -> bool:
        return module is self.model or _is_compiled(module)

    def _enter(self, module: torch.nn.Module) -> None:
        if _in_backward():  # computed again, up to an exception that ends it: no `_leave` follows
            return
        self._running.append(module)
        self._called.add(module)
        for param in module.parameters(recurse=self._compiled):
            if param in self._group_of:
                self._order.setdefault(param)
        # Only the model's own call is left for certain. In a compiled region, it would be traced.
        if module is self.model and self._watch is None and not self._compiled:
            self._watch = _watcher(self._read)
            self._watch.__enter__()

    def _leave(self, module: torch.nn.Module) -> None:
        if _in_backward():
            return
        while self._running and self._running.pop() is not module:
            pass
        if module is self.model:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None

    def _read(self, param: torch.nn.Parameter) -> None:
        if self._running and param in self._group_of:
            self._reads.setdefault(self._running[-1], set()).add(param)
            self._order.setdefault(param)
            self._map = None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


# Functions that read no value of a parameter.
_METADATA = frozenset(
    """dim element_size empty_like full_like get_device has_names is_complex is_contiguous
    is_floating_point is_inference is_pinned is_shared is_signed ndimension nelement new_empty
    new_empty_strided new_full new_ones new_tensor new_zeros numel ones_like rand_like randint_like
    randn_like register_hook requires_grad_ size storage_offset stride zeros_like""".split()  # noqa: SIM905
)
# Properties that are tensors of the same memory.
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def reads_values(func: Callable[..., object]) -> bool:
    """Returns False if the torch function `func` reads only a tensor's shape, type and the like."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in _VIEWS
    return name not in _METADATA


def _watcher(seen: Callable[[torch.nn.Parameter], None]) -> AbstractContextManager[object]:
    """Returns a torch function mode that calls `seen` with each parameter whose values are read."""

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., object],
            types: Sequence[type],
            args: Sequence[object] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            kwargs = kwargs or {}
            if not torch.compiler.is_compiling() and reads_values(func):
                for value in (*args, *kwargs.values()):
                    for item in value if isinstance(value, (list, tuple)) else (value,):
                        if isinstance(item, torch.nn.Parameter):
                            seen(item)
            return func(*args, **kwargs)

    return Watch()
