"""What the scripts about training share: algorithms as text, and new ranks that train."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

import dear
from common.launch.ranks import RankLost, Ranks, gather, rank_env
from dear.errors import UserError
from dear.lazy import torch
from dear.options import Options
from dear.training.algorithm import algorithm_options

ANSWER_S = 600.0
_END_S = 10.0


def parsed_algorithm(text: str) -> tuple[str, Options]:
    """`dear:update=sharded,fusion=none` as a name and its options; raises `UserError`."""
    name, _, rest = text.partition(":")
    pairs = (pair.partition("=") for pair in rest.split(",") if pair)
    options = {key: yaml.safe_load(value) for key, _, value in pairs}
    return name, algorithm_options(name, options)


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    backend: str | None = None,
    environment: Mapping[str, str] | None = None,
    limit_s: float = ANSWER_S,
) -> list[Any]:
    """What `function(*arguments)` returns on each rank; processes are new, and gone afterwards.

    Args:
        function: of a module's top level; called after `dear.init(backend=backend)`.
        environment: variables that are set before anything is imported.

    Raises:
        UserError: a rank failed, died, or did not answer within `limit_s`.
    """
    answers = {}
    with tempfile.TemporaryDirectory() as folder, Ranks() as started:
        for rank in range(ranks):
            place = rank_env(rank, ranks, store=Path(folder, "store"))
            env = {**(environment or {}), **place}
            started.function(
                _rank, backend, function, arguments, env=env, piped=True, method="spawn"
            )
        try:
            for rank, (ok, value) in gather(started.pipes, limit_s):
                if not ok:
                    raise UserError(f"rank {rank}: {value}")
                answers[rank] = value
        except RankLost as lost:
            raise UserError(f"{lost}; last words, if any, are above") from None
        started.stop(_END_S)
    return [answers[rank] for rank in range(ranks)]


def _rank(
    pipe: Connection, backend: str | None, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> int:
    try:
        torch.set_num_threads(1)
        dear.init(backend=backend)
        pipe.send((True, function(*arguments)))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
        return 1
    return 0
