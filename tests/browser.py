"""Headless Chromium for tests of a page, driven through its debugging pipe."""

import base64
import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip


def program() -> str | None:
    """Return Chromium's path; None where none is installed."""
    named = os.environ.get("FROSTGLASS_CHROMIUM")
    return named or next((found for name in PROGRAMS if (found := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(
    program() is None,
    reason="no Chromium: install it (Debian: chromium), or name it in FROSTGLASS_CHROMIUM",
)


class Tab:
    """One page of a browser; it notes what went wrong and what was asked for."""

    def __init__(self, send: int, receive: int):
        self._send, self._receive, self._rest, self._number = send, receive, b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._receive, 1 << 20)
            assert more, "Chromium ended"
            self._rest += more
        text, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(text)
        method, values = message.get("method", ""), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.errors.append(str(values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(values["entry"]["text"])
        return message

    def open(self, page: Path, width: int = 1200) -> None:
        """Load a page at a width in pixels, and forget what earlier pages did."""
        self.errors.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.call("Page.navigate", url=page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def print(self) -> bytes:
        """Return the page as it is printed, a PDF."""
        answer = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        return base64.b64decode(answer["data"])

    def picture(self) -> bytes:
        """Return the whole page as a PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


def pages_of(pdf: bytes) -> int:
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Start Chromium with a fresh profile; end it afterwards."""
    (commands, send), (receive, answers) = os.pipe(), os.pipe()
    # High numbers, because the browser's own, 3 and 4, may be in use here.
    ends = [fcntl.fcntl(each, fcntl.F_DUPFD, 20) for each in (commands, answers)]

    def connect() -> None:
        for number, end in enumerate(ends, 3):
            os.dup2(end, number)

    process = subprocess.Popen(
        [str(program()), *OPTIONS, f"--user-data-dir={profile}"],
        preexec_fn=connect,
        pass_fds=(3, 4),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (commands, answers, *ends):
        os.close(end)
    try:
        yield Tab(send, receive)
    finally:
        process.terminate()
        process.wait(20)
        os.close(send)
        os.close(receive)
