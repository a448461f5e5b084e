"""Where ranks run: this machine, or virtual hosts (network namespaces) joined by shaped links."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from dear.errors import UserError

# One second of a 1 Gb/s link is 125 MB: the bucket must be far below what is measured, and above
# one TSO packet (64 KiB), or tbf drops it.
_TBF = ("burst", "128kb", "latency", "50ms")
_PREFIX = "drb"
_runs = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host that ranks run on.

    Attributes:
        name: what ranks of this host share as host identity.
        address: where the other hosts reach it.
        ifname: the interface of that address.
        namespace: the network namespace it is, or None for the machine itself.
    """

    name: str
    address: str
    ifname: str
    namespace: str | None = None

    def command(self, command: list[str]) -> list[str]:
        """`command` as it must be started to run on this host."""
        if self.namespace is None:
            return command
        return ["ip", "netns", "exec", self.namespace, *command]


class Hosts:
    """`with Hosts(...) as hosts: hosts.all` - built on entry, removed on exit.

    Args:
        count: number of virtual hosts, or 0 for this machine alone.
        rate: speed of every link in both directions, as tc writes it, or "none".
        congestion: TCP congestion control of every connection between ranks; None: the default.
        ifname: interface to use on this machine (virtual hosts have only eth0).

    This machine with a congestion control of its own is one namespace that has only a loopback,
    so that the setting reaches every engine and nothing outside of the benchmark.
    """

    def __init__(
        self, count: int, rate: str = "none", congestion: str | None = None, ifname: str = "lo"
    ) -> None:
        self._count, self._rate, self._congestion = count, rate, congestion
        self._prefix = f"{_PREFIX}{os.getpid()}x{next(_runs)}"
        self._made: list[str] = []
        self.virtual = count > 0
        self.all = [Host(name="local", address="127.0.0.1", ifname=ifname)]

    def __enter__(self) -> Hosts:
        if not self.virtual and self._congestion is None:
            return self
        _require_root()
        _remove_stale()
        try:
            if self.virtual:
                self._build_network()
            else:
                self._build_loopback()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Ends what still runs in the namespaces of this object, and removes them."""
        # The switch, made first, goes last: a host's link goes with the host.
        while self._made:
            _remove(self._made.pop())

    def _build_network(self) -> None:
        switch = self._add("s")
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        self.all = []
        for index in range(self._count):
            name, port, address = self._add(f"h{index}"), f"p{index}", f"10.78.0.{index + 1}"
            peer = ("peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "add", port, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
            for namespace, link in ((name, "eth0"), (switch, port)):
                if self._rate != "none":
                    tbf = ("root", "tbf", "rate", self._rate, *_TBF)
                    _run("tc", "-n", namespace, "qdisc", "add", "dev", link, *tbf)
            self._control_congestion(name)
            host = Host(name=f"h{index}", address=address, ifname="eth0", namespace=name)
            self.all.append(host)

    def _build_loopback(self) -> None:
        name = self._add("l")
        _ip("-n", name, "link", "set", "lo", "up")
        self._control_congestion(name)
        self.all = [Host(name="local", address="127.0.0.1", ifname="lo", namespace=name)]

    def _add(self, suffix: str) -> str:
        name = self._prefix + suffix
        _ip("netns", "add", name)
        self._made.append(name)
        return name

    def _control_congestion(self, namespace: str) -> None:
        # By route: a namespace may not make a "restricted" algorithm (cubic) its default unless
        # the whole machine allows it to everybody, and that is not ours to change.
        if self._congestion is None:
            return
        for table in ("local", "main"):
            for route in _ip("-n", namespace, "route", "show", "table", table).splitlines():
                if not route.startswith("broadcast"):
                    change = (*route.split(), "table", table, "congctl", self._congestion)
                    _ip("-n", namespace, "route", "replace", *change)


def unable() -> str | None:
    """Why this process cannot build virtual hosts, or None if it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)} (iproute2)" if missing else None


def _require_root() -> None:
    reason = unable()
    if reason:
        raise UserError(
            f"--hosts netns and --congestion build network namespaces, which {reason}; "
            "use --hosts local without --congestion"
        )


def _remove_stale() -> None:
    """Removes what a run that was ended by SIGKILL has left."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0] if line.strip() else ""
        pid = name.removeprefix(_PREFIX).partition("x")[0]
        if name.startswith(_PREFIX) and pid.isdigit() and not Path("/proc", pid).exists():
            _remove(name)


def _remove(name: str) -> None:
    # A namespace lives on, nameless, while a process is in it.
    deadline = time.monotonic() + 5
    while pids := _ip("netns", "pids", name).split():
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} in namespace {name} do not end")
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    _ip("netns", "del", name)


def _ip(*args: str) -> str:
    return _run("ip", *args)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
