"""A headless Chromium for tests: what a page shows, what it looks like, and which errors the browser reports.

Tests control it with the DevTools protocol over a pair of pipes. It ends when the pipes are closed.
"""

from __future__ import annotations

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

from support.harness import WAIT

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_UNTIL = """new Promise((resolve) => {
  const look = () => { if (%s) { observer.disconnect(); resolve(true); } };
  const observer = new MutationObserver(look);
  observer.observe(document, {subtree: true, childList: true, characterData: true, attributes: true});
  look();
})"""


class Browser:
    """One page. `problems` are the errors that the browser has reported: of scripts, of its security policy, of the
    network. With a `password` it logs in to a server that requires one.
    """

    def __init__(self, profile: Path, password: str = "") -> None:
        self.problems: list[str] = []
        self._password = password
        self._number = 0
        self._unread = b""
        theirs_in, self._ours_out = os.pipe()
        self._ours_in, theirs_out = os.pipe()

        def place_pipes() -> None:
            # The protocol uses the descriptors 3 and 4, which may be descriptors of the pipes already.
            copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
            for number, copy in zip((3, 4), copies, strict=True):
                os.dup2(copy, number)

        assert PROGRAM is not None
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
        self._process = subprocess.Popen(
            [PROGRAM, *flags, f"--user-data-dir={profile}", "--window-size=1200,1000", "about:blank"],
            preexec_fn=place_pipes,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        if password:
            self._call("Fetch.enable", handleAuthRequests=True)

    def close(self) -> None:
        """End the browser."""
        os.close(self._ours_out)
        os.close(self._ours_in)
        try:
            self._process.wait(WAIT)
        finally:
            self._process.kill()

    def open(self, url: str) -> None:
        """Open a page."""
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression. A promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true on the page."""
        self.evaluate(_UNTIL % condition)

    def picture(self, path: Path) -> None:
        """Save a screenshot of the page as a PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        number = self._send(method, params)
        deadline = time.monotonic() + WAIT
        while True:
            message = self._receive(deadline)
            if message.get("id") == number:
                assert "error" not in message, (method, message)
                result: dict[str, Any] = message["result"]
                return result
            self._take(message)

    def _send(self, method: str, params: dict[str, object]) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._ours_out, json.dumps(message).encode() + b"\0")
        return self._number

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._ours_in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._ours_in, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _take(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(params["entry"]["text"])
            case "Fetch.requestPaused":
                self._send("Fetch.continueRequest", {"requestId": params["requestId"]})
            case "Fetch.authRequired":
                answer = {"response": "ProvideCredentials", "username": "me", "password": self._password}
                self._send(
                    "Fetch.continueWithAuth", {"requestId": params["requestId"], "authChallengeResponse": answer}
                )
