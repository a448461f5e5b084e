"""Who the virtual hosts are, for all processes of the sandbox: /etc/hosts, and a table for rsh.py.

Both vanish with the sandbox.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from common.emulation.init import LOCALHOST, SWITCH
from common.emulation.namespaces import proc_pid
from common.emulation.network import BRIDGE_ADDRESS

TABLE = "DEAR_VIRTUAL_HOSTS"  # the environment variable that names the table's file
_HOSTS = Path("/etc/hosts")


def resolvable() -> bool:
    """Whether the sandbox has an /etc/hosts of its own."""
    return os.path.ismount(_HOSTS)


def write(hosts: Mapping[str, tuple[str, int]]) -> None:
    """Makes names resolve, and this process's environment lead its children to the table.

    Args:
        hosts: for each name, the address and a process on the host, as /proc shows it.
    """
    lines = [f"{BRIDGE_ADDRESS} {SWITCH}"]
    lines += [f"{address} {name}" for name, (address, _) in hosts.items()]
    _write_hosts(lines)
    rows = {name: {"address": address, "pid": pid} for name, (address, pid) in hosts.items()}
    _table().write_text(json.dumps(rows))
    # Each host has another /dev/shm; by this path it finds the one of the sandbox.
    os.environ[TABLE] = f"/proc/{proc_pid()}/root{_table()}"


def forget() -> None:
    """Undoes `write`."""
    _write_hosts([f"127.0.0.1 {SWITCH}"])
    _table().unlink(missing_ok=True)
    os.environ.pop(TABLE, None)


def read() -> dict[str, int]:
    """The process on each host, by name and by address.

    Raises:
        KeyError: there is no table: this process was not started by a program with a cluster.
    """
    rows = json.loads(Path(os.environ[TABLE]).read_text())
    by_address = {row["address"]: row["pid"] for row in rows.values()}
    return {name: row["pid"] for name, row in rows.items()} | by_address


def _table() -> Path:
    return Path("/dev/shm", f"virtual-hosts-{os.getpid()}.json")


def _write_hosts(lines: list[str]) -> None:
    if resolvable():
        _HOSTS.write_text(LOCALHOST + "".join(f"{line}\n" for line in lines))
