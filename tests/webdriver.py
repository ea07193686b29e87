"""A headless Chromium for tests, driven over chromedriver's HTTP with the standard library."""

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
]  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of a reference, as WebDriver defines it
ENTER = "\ue007"


class Browser:
    """One browser window."""

    def __init__(self, address: str, profile: Path, width: int, height: int, *, phone: bool):
        chrome: dict[str, Any] = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        chrome["args"].append(f"--window-size={width},{height}")
        if phone:
            screen = {"width": width, "height": height, "pixelRatio": 2, "touch": True}
            chrome["mobileEmulation"] = {"deviceMetrics": screen}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": logs}
        self._address = address
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/session/{session['sessionId']}"

    def close(self) -> None:
        self._call("DELETE", "")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())["value"]

    def open(self, address: str) -> None:
        self._call("POST", "/url", {"url": address})

    def reload(self) -> None:
        self._call("POST", "/refresh", {})

    def back(self) -> None:
        self._call("POST", "/back", {})

    @property
    def title(self) -> str:
        return self._call("GET", "/title")

    def script(self, text: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self._call("POST", "/execute/sync", {"script": f"return {text}", "args": []})

    def find(self, selector: str) -> list[str]:
        query = {"using": "css selector", "value": selector}
        return [each[ELEMENT] for each in self._call("POST", "/elements", query)]

    def click(self, selector: str, number: int = 0) -> None:
        self._call("POST", f"/element/{self.find(selector)[number]}/click", {})

    def leave(self, act: Callable[[], None], within: float = 20.0) -> None:
        """Do something that loads another page, and wait until that is complete."""
        self.script("(window.left_behind = true)")
        act()
        gone = "!window.left_behind && document.readyState === 'complete'"
        deadline = time.monotonic() + within
        while not self.script(gone):
            assert time.monotonic() < deadline, "the page stayed"
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Press keys wherever the focus is."""
        steps = [{"type": kind, "value": k} for k in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": steps}]})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def errors(self) -> list[str]:
        """Messages of the console since the last call, such as violations of the policy."""
        return [each["message"] for each in self._call("POST", "/se/log", {"type": "browser"})]

    def requested(self) -> list[str]:
        """Addresses that pages asked for since the last call."""
        log = self._call("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(each["message"])["message"] for each in log]
        return [
            each["params"]["request"]["url"]
            for each in messages
            if each["method"] == "Network.requestWillBeSent"
            and each["params"]["request"]["url"].startswith("http")  # not the empty tab's own
        ]


@contextmanager
def browser(tmp_path: Path, width: int, height: int, *, phone: bool = False) -> Iterator[Browser]:
    """Open a window of a size; skip the test where there is no Chromium."""
    driver = shutil.which("chromedriver")
    if not driver or not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        started = (re.search(r"successfully on port (\d+)", line) for line in process.stdout)
        port = next(found[1] for found in started if found)
        window = Browser(
            f"http://127.0.0.1:{port}", tmp_path / "profile", width, height, phone=phone
        )
        try:
            yield window
        finally:
            window.close()
    finally:
        process.kill()
        process.wait()
