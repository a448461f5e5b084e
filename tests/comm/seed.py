"""Shared parts of the tests of the seeds' `Communicator`: how it is built, how its errors read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from comm_core.streams.communicator import Communicator

module = sys.modules[Communicator.__module__]


def over_gloo() -> dist.ProcessGroup:
    """A group of all ranks, made once per pool."""
    if not _groups:
        _groups.append(dist.new_group(backend="gloo"))
    return _groups[0]


_groups: list[dist.ProcessGroup] = []


def streams(count: int = 2) -> Communicator:
    """A communicator over Gloo."""
    return Communicator(count, over_gloo(), timeout_s=20)


def error(kind: type[Exception], call: Callable[..., Any], *args: Any, **named: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **named)
    text = str(caught.value)
    assert "\n" not in text, f"not one sentence: {text}"
    return text
