"""What a person sees while a sweep runs; messages go to stderr."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from common.harness.progress import Progress


class ProgressLine:
    """One line that is rewritten on a terminal; a line per launch where output is kept."""

    def __init__(self, stream: TextIO = sys.stderr, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet
        self._live = stream.isatty()
        self._last = ""

    def __call__(self, progress: Progress) -> None:
        if self._quiet:
            return
        parts = [f"[{min(progress.done + 1, progress.total)}/{progress.total}] {progress.title}"]
        if progress.best:
            parts.append(f"best: {progress.best}")
        eta_s = progress.eta_s()
        if eta_s is not None:
            parts.append(f"ETA {duration(eta_s)}")
        text = "  ".join(parts)
        if text == self._last:
            return
        self._last = text
        if self._live:
            self._stream.write(f"\r\x1b[K{text}")
        else:
            self._stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Removes the line from a terminal."""
        if self._live and self._last:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._last = ""


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
