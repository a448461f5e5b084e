"""Open MPI hostfiles: which hosts there are, and how many ranks each may take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dear.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Host:
    """One line of a hostfile."""

    name: str
    slots: int


def read_hostfile(path: Path, world_size: int) -> list[Host]:
    """The hosts of `path`, which must have at least `world_size` slots together.

    Raises:
        UserError: the file does not exist, a line is not `HOST [slots=N]`, or slots are too few.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"hostfile {path}: {error.strerror}") from None
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = "1"
        for word in words[1:]:
            key, _, slots = word.partition("=")
            if key != "slots" or not re.fullmatch("[0-9]+", slots) or int(slots) < 1:
                raise UserError(
                    f"hostfile {path} line {number}: must be `HOST slots=N`, got {line.strip()!r}"
                )
        hosts.append(Host(name=words[0], slots=int(slots)))
    total = sum(host.slots for host in hosts)
    if total < world_size:
        raise UserError(
            f"hostfile {path} has {total} slots, fewer than the {world_size} workers asked for"
        )
    return hosts
