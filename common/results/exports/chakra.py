"""Execution traces of predicted steps in MLCommons' Chakra format, which network simulators read.

A trial gets a folder with a file for each rank, `step.RANK.et`, and `comm_groups.json` with the
ranks of each process group that is not the whole world. The nodes of a rank are what its device
computes and what it sends. Their data dependencies are those of the algorithm: a transfer follows
the computation that made its gradients, and a computation follows the transfers that the algorithm
awaits before it. So a simulator with another network gets other times, and the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from common.virtual.world.trace import Computation, Node, Sent, Trace
from dear.errors import UserError

if TYPE_CHECKING:
    from chakra.schema.protobuf.et_def_pb2 import GlobalMetadata
    from chakra.schema.protobuf.et_def_pb2 import Node as Message

INSTALL = "pip install --no-deps mlc-chakra protobuf"
MOST_RANKS = 1024
"""Largest number of ranks, each of which has a file."""
_VERSION = "1.0.0"
_WORLD = "0"
"""Name of the group of all ranks. Simulators know it without a list; other names are from 1 on."""
_COLLECTIVES = {
    "all_reduce": "ALL_REDUCE",
    "reduce_scatter": "REDUCE_SCATTER",
    "all_gather": "ALL_GATHER",
    "broadcast": "BROADCAST",
    "reduce": "REDUCE",
}


def schema() -> ModuleType:
    """Returns the module with Chakra's messages; raises `UserError` if it is not installed."""
    try:
        from chakra.schema.protobuf import et_def_pb2
    except ImportError as error:
        raise UserError(f"--chakra: {error}; {INSTALL}") from None
    module: ModuleType = et_def_pb2
    return module


def write(trace: Trace, ranks: int, folder: Path) -> None:
    """Writes the files of all `ranks`, of which the trace shows the first, into a new folder.

    Raises:
        UserError: Chakra has no node for a transfer of the trace, or there are too many ranks.
    """
    if ranks > MOST_RANKS:
        raise UserError(f"{ranks} ranks need as many Chakra files; allowed: up to {MOST_RANKS}")
    sent = [node for node in trace.nodes if isinstance(node, Sent)]
    groups = {members: _alike(members, ranks) for members in map(_members, sent)}
    parts = sorted({group for alike in groups.values() for group in alike if len(group) < ranks})
    names = {group: str(number) for number, group in enumerate(parts, 1)}
    folder.mkdir(parents=True, exist_ok=True)
    if names:
        lists = {name: group for group, name in names.items()}
        (folder / "comm_groups.json").write_text(json.dumps(lists), encoding="utf-8")
    names[tuple(range(ranks))] = _WORLD
    contents: dict[tuple[str, ...], bytes] = {}
    for rank in range(ranks):
        mine = [names[next(g for g in alike if rank in g)] for alike in groups.values()]
        key = tuple(mine)
        if key not in contents:
            contents[key] = b"".join(_messages(trace, dict(zip(groups, mine, strict=True))))
        (folder / f"step.{rank}.et").write_bytes(contents[key])


def _members(sent: Sent) -> tuple[int, ...]:
    operation = sent.transfer.name
    if sent.ranks is None or operation not in _COLLECTIVES:
        raise UserError(
            f"no Chakra trace with {operation}: it has messages between single ranks, and the "
            f"prediction knows only those of rank 0; allowed: {', '.join(_COLLECTIVES)}"
        )
    return sent.ranks


def _alike(members: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Returns the groups that divide all ranks as `members` divides its part of them."""
    count = len(members)
    stride = members[1] - members[0] if count > 1 else 1
    block = count * stride
    if list(members) != list(range(0, block, stride)) or ranks % block:
        raise UserError(f"no Chakra trace with a group of ranks {list(members)} of {ranks}")
    return [
        tuple(range(start + first, start + first + block, stride))
        for start in range(0, ranks, block)
        for first in range(stride)
    ]


def _messages(trace: Trace, groups: Mapping[tuple[int, ...], str]) -> Iterator[bytes]:
    """Yields the messages of a rank's file.

    Args:
        groups: name of the rank's group, by that of rank 0.
    """
    chakra = schema()
    yield _framed(chakra.GlobalMetadata(version=_VERSION))
    numbers: dict[Node, int] = {}
    began_s = trace.phases_s[0][0]
    for number, node in enumerate(trace.nodes):
        numbers[node] = number
        start_s, end_s = _times(node)
        start_us, end_us = (round(1e6 * (moment - began_s)) for moment in (start_s, end_s))
        message = chakra.Node(
            id=number,
            name=_name(node, trace),
            type=chakra.COMP_NODE if isinstance(node, Computation) else chakra.COMM_COLL_NODE,
            data_deps=[numbers[before] for before in node.after],
            start_time_micros=start_us,
            duration_micros=end_us - start_us,
        )
        message.attr.add(name="is_cpu_op", bool_val=False)
        if isinstance(node, Sent):
            _describe(message, chakra, node, groups[node.ranks or ()])
        yield _framed(message)


def _describe(message: Message, chakra: ModuleType, sent: Sent, group: str) -> None:
    operation, nbytes = sent.transfer.name, sent.transfer.nbytes
    # Chakra counts what a rank puts in.
    given = nbytes // len(sent.ranks or ()) if operation == "all_gather" else nbytes
    message.attr.add(name="comm_type", int64_val=getattr(chakra, _COLLECTIVES[operation]))
    message.attr.add(name="comm_size", int64_val=given)
    message.attr.add(name="comm_priority", int32_val=sent.priority)
    message.attr.add(name="pg_name", string_val=group)


def _times(node: Node) -> tuple[float, float]:
    if isinstance(node, Computation):
        return node.start_s, node.end_s
    times = node.transfer.times()
    return times.started_s, times.finished_s


def _name(node: Node, trace: Trace) -> str:
    if isinstance(node, Sent):
        return node.transfer.name
    step = max(phases for phases in trace.phases_s if phases[0] <= node.start_s)
    phase = ("forward", "backward", "update")[sum(end <= node.start_s for end in step[1:3])]
    return phase if node.name in ("", phase) else f"{phase} {node.name}"


def _framed(message: GlobalMetadata | Message) -> bytes:
    """Returns a message after its length as a varint, as Chakra's files have it."""
    data: bytes = message.SerializeToString()
    size, left = bytearray(), len(data)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*size, left]) + data
