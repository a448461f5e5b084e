"""Model from a user's Python file, which defines up to three functions.

    def model() -> torch.nn.Module               # or the file defines one class of modules
    def batch(batch_size) -> (inputs, targets)   # inputs: a tensor, a tuple, or a dict by name
    def loss(output, *targets) -> torch.Tensor   # without it: cross entropy

docs/bring_your_own.md describes the steps.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from common.models import torchvision_cpu  # noqa: F401  (the file may import torchvision)
from common.models.registry import FILE, brought_of
from common.models.workload import Workload
from dear.errors import UserError
from dear.training.files import described, module_of

_PACKAGE = "user_models"


def build(
    name: str, batch_size: int, sentence_len: int | None, generator: torch.Generator
) -> Workload:
    """Returns the model of a file that was added to the registry, with one batch from the file.

    The file's functions use the global random states of torch, numpy and Python. During the call of
    `batch`, `generator` seeds these states.

    Raises:
        UserError: the file lacks a function, or one of its functions raises an exception.
    """
    path = Path(brought_of(name, batch_size).source.removeprefix(FILE))
    return workload(path, batch_size, generator)


def check(path: Path) -> tuple[ModuleType, Callable[[], Any]]:
    """Imports the file, and returns the module and the function that makes its model.

    Raises:
        UserError: the file lacks a function, or cannot be imported.
    """
    file = module_of(path, _PACKAGE)
    make = _maker(path, file)
    if not callable(getattr(file, "batch", None)):
        raise UserError(
            f"{path}: has no function batch(batch_size), which returns (inputs, targets) with "
            "that number of samples"
        )
    return file, make


def workload(path: Path, batch_size: int, generator: torch.Generator) -> Workload:
    """Returns the same as `build`, for any file."""
    file, make = check(path)
    model = _call(path, "model", make)
    if not isinstance(model, nn.Module):
        raise UserError(f"{path}: model() must return a torch.nn.Module, got {_kind(model)}")
    seed = int(torch.randint(2**31, (), generator=generator, device="cpu"))
    with torch.random.fork_rng(devices=[]), _seeded(seed):
        torch.manual_seed(seed)
        pair = _call(path, "batch", lambda: file.batch(batch_size))
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise UserError(f"{path}: batch() must return a pair (inputs, targets), got {_kind(pair)}")
    inputs, targets = pair
    given = _by_name(path, inputs) if isinstance(inputs, dict) else _tensors(path, inputs)
    wanted = _tensors(path, targets)
    tensors = [*(given.values() if isinstance(given, dict) else given), *wanted]
    # The samples are along the first dimension, or along the second after that of a sequence.
    if not any(batch_size in tensor.shape[:2] for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UserError(
            f"{path}: batch({batch_size}) must return {batch_size} samples, but no tensor has "
            f"this size as its first or second dimension: {shapes}"
        )
    return Workload(
        model=model,
        inputs=given,
        targets=wanted,
        criterion=getattr(file, "loss", nn.functional.cross_entropy),
    )


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the random states of numpy and Python, and restores them at the end."""
    before = np.random.get_state(), random.getstate()
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before[0])
        random.setstate(before[1])


def _maker(path: Path, file: ModuleType) -> Callable[[], Any]:
    model = getattr(file, "model", None)
    if isinstance(model, nn.Module):
        raise UserError(
            f"{path}: model is already a module; write a function model() that returns one, so "
            "that all ranks draw the same weights"
        )
    if callable(model):
        return model
    kinds = [
        value
        for value in vars(file).values()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == file.__name__
    ]
    if len(kinds) != 1:
        names = ", ".join(kind.__name__ for kind in kinds) or "none"
        raise UserError(
            f"{path}: must have a function model() or exactly one subclass of torch.nn.Module "
            f"(it has: {names})"
        )
    needed = [
        param.name
        for param in inspect.signature(kinds[0]).parameters.values()
        if param.default is param.empty
        and param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
    ]
    if needed:
        raise UserError(
            f"{path}: {kinds[0].__name__} needs arguments ({', '.join(needed)}); write a function "
            "model() that returns one"
        )
    return kinds[0]


def _call(path: Path, name: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: {name}() failed: {described(error, path)}") from error


def _tensors(path: Path, values: Any) -> tuple[torch.Tensor, ...]:
    if values is None:
        return ()
    given = tuple(values) if isinstance(values, tuple | list) else (values,)
    for value in given:
        _check(path, value)
    return given


def _by_name(path: Path, values: dict[str, Any]) -> dict[str, torch.Tensor]:
    for value in values.values():
        _check(path, value)
    return values


def _check(path: Path, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise UserError(f"{path}: batch() must return tensors, got {_kind(value)}")


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
