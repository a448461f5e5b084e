"""Asks hosts whether they answer, all at once, before anything is started on them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from common.launch.hosts import Host
from dear.errors import UserError

PROBE_S = 10.0


def probe(hosts: Sequence[Host], agent: Sequence[str]) -> None:
    """Runs `true` on every host through the remote shell.

    Raises:
        UserError: there is no such remote shell, or a host (named) does not answer in time.
    """
    if not hosts:
        return
    if shutil.which(agent[0]) is None:
        raise UserError(
            f"no remote shell {agent[0]!r} on the PATH, needed for host {hosts[0].name}; install "
            "it or set the launcher's option agent"
        )
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        reasons = list(pool.map(lambda host: _ask(host, agent), hosts))
    silent = [(host.name, reason) for host, reason in zip(hosts, reasons, strict=True) if reason]
    if silent:
        names = ", ".join(name for name, _ in silent)
        raise UserError(
            f"no answer from {'hosts' if len(silent) > 1 else 'host'} {names}: {silent[0][1]}"
        )


def _ask(host: Host, agent: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            [*agent, host.reached_at, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_S,
        )
    except subprocess.TimeoutExpired:
        return f"not within {PROBE_S:g} s"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"{last} (exit status {done.returncode})"
