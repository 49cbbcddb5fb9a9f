"""A real browser for tests of pages: headless Chromium, told what to do over a pipe.

Its protocol is Chromium's own (DevTools): one JSON object a message, a zero byte behind each.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
_TIMEOUT_S = 60.0


def find_browser() -> str | None:
    """Returns the path of an installed Chromium, None where there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """A browser that runs until `close`.

    Args:
        program: of `find_browser`.
        profile: an empty folder for its files.
    """

    def __init__(self, program: str, profile: Path) -> None:
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        # The browser reads from 3 and writes to 4, which may be taken here.
        far = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs, answers)]
        options = (
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}",
        )  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{far[0]} 4>&{far[1]}', "bash", program, *options],
            pass_fds=far, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (theirs, answers, *far):
            os.close(fd)
        self._number, self._read, self._events = 0, b"", []

    def open(self, path: Path, width: int) -> "Tab":
        """Opens a file in a tab of a screen's width in CSS pixels; returns once it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for method in ("Page.enable", "Runtime.enable", "Log.enable"):
            tab.call(method)
        tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        tab.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in tab.events()):
            self._events.append(self._receive())
        return tab

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def events_of(self, session: str) -> list[dict[str, Any]]:
        """Returns what a tab has told so far without being asked."""
        return [event for event in self._events if event.get("sessionId") == session]

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(timeout=_TIMEOUT_S)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._read:
            assert select.select([self._in], [], [], deadline - time.monotonic())[0], "no answer"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)


class Tab:
    """A loaded page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol for this tab."""
        return self._browser.call(method, self._session, **params)

    def events(self) -> list[dict[str, Any]]:
        """Returns the tab's events so far."""
        return self._browser.events_of(self._session)

    def evaluate(self, script: str) -> Any:
        """Returns the value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def errors(self) -> list[str]:
        """Returns what the page has written to the console as errors, exceptions included."""
        self.evaluate("0")  # events before the answer have been read
        return [
            json.dumps(event["params"])
            for event in self.events()
            if event["method"] == "Runtime.exceptionThrown"
            or (
                event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error"
            )
            or (
                event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] == "error"
            )
        ]

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
