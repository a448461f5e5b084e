"""What all checks of fidelity print and keep."""

from __future__ import annotations

import argparse
import datetime
import sys
from typing import Any

from common.machine import machine_card


class Report:
    """A heading, rows and a verdict; and the same as a record."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._card = machine_card()
        self._started = datetime.datetime.now(datetime.timezone.utc)
        self._what = args.what

    def header(self) -> list[str]:
        """Lines that say where the numbers come from."""
        card = self._card
        return [
            f"# {card['cpu']}, {card['cores']} cores, {card['os']}, Linux {card['kernel']}",
            f"# commit {card['commit']}, {self._started:%Y-%m-%d %H:%M} UTC",
        ]

    def record(self, **values: Any) -> dict[str, Any]:
        """What a file of raw numbers says besides them, and `values`."""
        return {
            "schema": 1,
            "tool": f"bench/fidelity {self._what}",
            "started": self._started.isoformat(timespec="seconds"),
            "argv": sys.argv[1:],
            "machine": self._card,
            **values,
        }


def verdict(off_percent: float, bar_percent: float) -> str:
    """`ok`, or `MISSED` if further off than the bar in either direction."""
    return "ok" if abs(off_percent) <= bar_percent else "MISSED"
