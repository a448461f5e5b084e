"""The page of a sweep over HTTP, for who watches it run; it looks by itself for a newer one.

The sweep is measuring on the same cores. So nothing is done but when a browser asks, a page is made
again only when there is another record, and figures are drawn when no run holds the folder.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from common.results.report.page import Live
from dear.errors import UserError

_FILES = ("records.jsonl", "experiment.json")
_LOCK = ".lock"

Build = Callable[[Live], str]
"""The page's HTML."""


def running(folder: Path) -> bool:
    """Whether a run holds the sweep's folder; it is looked up, not tried, so that none is hindered.

    Told from the kernel's list of locks, by the file's number.
    """
    path = folder / _LOCK
    if not path.exists():
        return False
    number = path.stat().st_ino
    lines = Path("/proc/locks").read_text().splitlines()
    return any("FLOCK" in line and line.split()[-3].endswith(f":{number}") for line in lines)


def version(folder: Path) -> str:
    """Changes with the records, and when a run begins or ends."""
    parts = ["running" if running(folder) else "ended"]
    for name in _FILES:
        path = folder / name
        if path.exists():
            facts = path.stat()
            parts.append(f"{facts.st_mtime_ns}.{facts.st_size}")
    return "-".join(parts)


class Pages:
    """The newest page of a sweep, made when it is asked for."""

    def __init__(self, folder: Path, build: Build) -> None:
        self._folder, self._build = folder, build
        self._one_at_a_time = threading.Lock()
        self._version, self._page = "", b""

    def page(self) -> bytes:
        """As UTF-8; made anew if the sweep has gone on."""
        with self._one_at_a_time:
            now = version(self._folder)
            if now != self._version:
                live = Live(version=now, figures=now.startswith("ended"))
                self._page, self._version = self._build(live).encode(), now
            return self._page

    def version(self) -> bytes:
        """What the newest page would say of itself."""
        return version(self._folder).encode()


def server(folder: Path, build: Build, host: str, port: int) -> ThreadingHTTPServer:
    """Listens, and answers when it is told to; `/` is the page, `/version` its version.

    Args:
        port: 0 takes one that is free.

    Raises:
        UserError: the address cannot be listened on.
    """
    pages = Pages(folder, build)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/version":
                self._answer(HTTPStatus.OK, "text/plain", pages.version())
            elif self.path == "/":
                try:
                    self._answer(HTTPStatus.OK, "text/html", pages.page())
                except UserError as error:
                    text = f"error: {error}\n".encode()
                    self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", text)
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /version\n")

        def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """A line per look would bury everything else."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that has gone away is no error; all else is told."""
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(request, client_address)

    try:
        return Server((host, port), Handler)
    except OSError as error:
        raise UserError(f"--serve: cannot listen on {host}:{port}: {error.strerror}") from None
    except OverflowError:
        raise UserError(f"--port {port}: must be 0 to 65535") from None
