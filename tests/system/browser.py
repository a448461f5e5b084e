"""Chromium without a window, driven through a pipe: what a page does when somebody uses it.

The protocol is that of its developer tools, a JSON object per message, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next((program for name in ("chromium", "chromium-browser", "google-chrome")
                if (program := shutil.which(name))), None)  # fmt: skip
LIMIT_S = 60.0


class Browser:
    """One page; what it has asked for and complained of."""

    def __init__(self, folder: Path) -> None:
        """Starts it.

        Args:
            folder: for its files; a new one.
        """
        to_it, ours = os.pipe()
        theirs, from_it = os.pipe()

        def place() -> None:
            # 3 and 4, whatever numbers the pipes have got.
            high = os.dup(to_it), os.dup(from_it)
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [
                *(PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
                f"--user-data-dir={folder}",
            ],
            pass_fds=(3, 4),
            preexec_fn=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(from_it)
        self._write, self._read, self._rest = ours, theirs, b""
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns what it gives."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._events.append(answer)

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "the browser says nothing more"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Goes there, and waits until it is loaded."""
        self._events.clear()
        self.send("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())

    def value(self, script: str) -> Any:
        """Returns the value of an expression, as JSON; a promise is waited for."""
        program = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in program, program["exceptionDetails"]
        return program["result"].get("value")

    def press(self, key: str) -> None:
        """Enter, Tab, Escape, or a letter."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27}
        more = {"text": "\r"} if key == "Enter" else {} if key in codes else {"text": key}
        code = codes.get(key, ord(key[0].upper()))
        same = {"key": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", **same, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", **same)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """The size of the window, and which colours the system has."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path, whole: bool = True) -> None:
        """Writes what is to be seen as PNG."""
        program = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(program["data"]))

    def paper(self, path: Path) -> None:
        """Writes what would be printed as PDF."""
        program = self.send("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        path.write_bytes(base64.b64decode(program["data"]))

    @property
    def requests(self) -> list[str]:
        """Addresses that the page has asked for since it was opened, itself included."""
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings in the page's console."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [
            json.dumps(event["params"]) for event in self._events if event.get("method") in kinds
        ]

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
