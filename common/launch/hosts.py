"""Where ranks run: the hosts of a hostfile or virtual ones, and which host takes which ranks."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dear.errors import UserError

_HERE = ("localhost", "127.0.0.1", "::1")


class Virtual(Protocol):
    """What a launcher needs of a virtual host."""

    name: str
    ifname: str
    pid: int

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` as it must be started to run on this host."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and how many ranks it may take."""

    name: str
    slots: int
    address: str | None = None
    """Where the others reach it; None: by its name. Virtual hosts always have a name."""
    virtual: Virtual | None = None
    """Set if this is a host of an emulated cluster."""

    @property
    def reached_at(self) -> str:
        """Name or address for the other hosts."""
        return self.name if self.virtual is not None else self.address or self.name

    @property
    def here(self) -> bool:
        """True if this process runs on it."""
        name = socket.gethostname()
        return self.virtual is None and self.name in (*_HERE, name, name.partition(".")[0])

    @property
    def loopback(self) -> bool:
        """True if no other host could reach it by this name."""
        return self.virtual is None and self.reached_at in _HERE


@dataclass(frozen=True, kw_only=True)
class Block:
    """The ranks of one job on one host: `count` of them from `first` on."""

    host: Host
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


def blocks(hosts: Sequence[Host], world_size: int) -> list[Block]:
    """Fills the slots of the hosts in their order, as Open MPI does; hosts without a rank are out.

    Raises:
        UserError: there are fewer slots than ranks.
    """
    require_slots(hosts, world_size, "the hosts have")
    made: list[Block] = []
    first = 0
    for host in hosts:
        count = min(host.slots, world_size - first)
        if count:
            made.append(Block(host=host, first=first, count=count))
        first += count
    return made


def require_slots(hosts: Sequence[Host], world_size: int, who_has: str) -> None:
    """Raises `UserError` if the hosts have fewer slots than `world_size`."""
    total = sum(host.slots for host in hosts)
    if total < world_size:
        raise UserError(f"{who_has} {total} slots, fewer than the {world_size} workers asked for")


def are_virtual(hosts: Sequence[Host] | None) -> bool:
    """True if these are hosts of an emulated cluster."""
    return bool(hosts) and hosts[0].virtual is not None


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
        if any(host.name == words[0] for host in hosts):
            raise UserError(
                f"hostfile {path} line {number}: host {words[0]} stands twice; write one line with "
                "the sum of its slots"
            )
        hosts.append(Host(name=words[0], slots=int(slots)))
    require_slots(hosts, world_size, f"hostfile {path} has")
    return hosts
