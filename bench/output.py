"""The file that keeps a run's raw numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dear.errors import UserError


class Output:
    """Claims `path` at once, so that a run does not find out at its end; None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._saved = False
        if path is None:
            return
        try:
            path.open("x").close()
        except FileExistsError:
            raise UserError(f"--json {path} exists; results are never overwritten") from None
        except OSError as error:
            raise UserError(f"--json {path} cannot be written: {error.strerror}") from None

    def save(self, record: dict[str, Any]) -> None:
        """Replaces what the file holds; a run that fails later loses only what came after."""
        if self._path is None:
            return
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(record) + "\n")
        part.replace(self._path)
        self._saved = True

    def close(self) -> None:
        """Gives the name back if nothing has been saved."""
        if self._path is not None and not self._saved:
            self._path.unlink(missing_ok=True)
