"""Result file of a run, and the machine and commit that the results belong to."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from common.machine import machine_card
from dear.errors import UserError


class Output:
    """Result file. `with Output(path) as output:` creates it at once, to fail early. A file without
    results is removed at the end. With the path None nothing is written. `card` has facts about
    this machine."""

    def __init__(self, path: Path | None) -> None:
        self.card = machine_card()
        self._started = datetime.datetime.now(datetime.timezone.utc)
        self._path = path
        self._saved = False

    def __enter__(self) -> Output:
        if self._path is not None:
            try:
                self._path.open("x", encoding="utf-8").close()
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

    def save(self, tool: str, results: dict[str, Any]) -> None:
        """Replaces the content of the file; a run that fails later loses only later results."""
        if self._path is None:
            return
        about = {"schema": 1, "tool": tool, "started": self._started.isoformat(timespec="seconds")}
        about |= {"argv": sys.argv[1:], "machine": self.card}
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(about | results) + "\n", encoding="utf-8")
        part.replace(self._path)
        self._saved = True

    def heading(self) -> list[str]:
        """Returns lines that name the machine, the commit and the time."""
        card = self.card
        return [
            f"# {card['cpu']}, {card['cores']} cores, {card['memory_bytes'] / 2**30:.0f} GiB, "
            f"{card['os']}, Linux {card['kernel']}, Python {card['python']}",
            f"# commit {card['commit']}, {self._started:%Y-%m-%d %H:%M} UTC",
        ]


def note(text: str) -> None:
    """Prints progress to stderr; results go to stdout."""
    print(f"  {text}", file=sys.stderr, flush=True)
