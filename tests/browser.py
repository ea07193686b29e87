"""Headless Chromium for tests of a page, driven through its debugging pipe."""

import base64
import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
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
# The numbers of keys that write nothing, or a line; others are the character itself.
KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "ArrowLeft": (37, ""), "ArrowRight": (39, "")}


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

    def open(self, page: Path | str, width: int = 1200, height: int = 900) -> None:
        """Load a page at a size in pixels, and forget what earlier pages did."""
        self.errors.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        middle = f"""(() => {{ const each = document.querySelector({json.dumps(selector)});
            each.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = each.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        x, y = self.ask(middle)
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **at)

    def press(self, key: str) -> None:
        """Press a key wherever the focus is."""
        number, text = KEYS.get(key, (ord(key.upper()), key) if len(key) == 1 else (0, ""))
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            values = {"key": key, "windowsVirtualKeyCode": number, **typed}
            self.call("Input.dispatchKeyEvent", type=kind, **values)

    def leave(self, act: Callable[[], object], within: float = 20.0) -> None:
        """Do something that loads another page, and wait until that is complete."""
        self.ask("window.left_behind = true")
        act()
        gone = "!window.left_behind && document.readyState === 'complete'"
        deadline = time.monotonic() + within
        while not self._asked_meanwhile(gone):
            assert time.monotonic() < deadline, "the page stayed"
            time.sleep(0.02)

    def _asked_meanwhile(self, expression: str) -> Any:
        """Return the value of an expression; False if the page went away while it was asked."""
        try:
            return self.ask(expression)
        except AssertionError:
            return False

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
