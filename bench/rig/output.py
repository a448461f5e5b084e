"""Where a run's numbers come from, and the file that keeps them."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from common.machine import machine_card
from dear.errors import UserError


class Output:
    """`with Output(path) as output:` claims `path` at once, so that a run does not find out at its
    end; None keeps nothing. Without results the name is given back.

    Args:
        go_on: a file that is there is read and added to, not refused.

    Attributes:
        card: this machine.
        earlier: what the file held.
    """

    def __init__(self, path: Path | None, go_on: bool = False) -> None:
        self.card = machine_card()
        self.earlier: dict[str, Any] | None = None
        self._go_on = go_on
        self._started = datetime.datetime.now(datetime.timezone.utc)
        self._path = path
        self._saved = False

    def __enter__(self) -> Output:
        if self._path is not None and self._go_on and self._path.exists():
            self.earlier = self._read()
            self._saved = True
        elif self._path is not None:
            try:
                self._path.open("x").close()
            except FileExistsError:
                raise UserError(
                    f"--json {self._path} exists; results are never overwritten"
                ) from None
            except OSError as error:
                raise UserError(
                    f"--json {self._path} cannot be written: {error.strerror}"
                ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None and not self._saved:
            self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"--json {self._path} holds no results to go on with")
        return found

    def save(self, record: dict[str, Any]) -> None:
        """Replaces what the file holds; a run that fails later loses only what came after."""
        if self._path is None:
            return
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(record) + "\n")
        part.replace(self._path)
        self._saved = True

    def heading(self) -> list[str]:
        """Lines that say where the numbers come from."""
        card = self.card
        return [
            f"# {card['cpu']}, {card['cores']} cores, {card['memory_bytes'] / 2**30:.0f} GiB, "
            f"{card['os']}, Linux {card['kernel']}, Python {card['python']}",
            f"# commit {card['commit']}, {self._started:%Y-%m-%d %H:%M} UTC",
        ]

    def about(self, tool: str) -> dict[str, Any]:
        """The same in the file."""
        return {
            "schema": 1,
            "tool": tool,
            "started": self._started.isoformat(timespec="seconds"),
            "argv": sys.argv[1:],
            "machine": self.card,
        }


def note(text: str) -> None:
    """Progress, for who watches; results go to stdout."""
    print(f"  {text}", file=sys.stderr, flush=True)
