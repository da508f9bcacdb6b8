"""A headless Chromium, driven by its DevTools protocol over a pair of pipes; for tests of pages.

Messages are JSON, each ended by a zero byte, over file descriptors 3 and 4 of the browser
(`--remote-debugging-pipe`); their methods are in https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

PATIENCE = 60
"""Seconds that an answer may take on a machine that is busy."""

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find():
    """The path of a Chromium on this machine; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One browser with one page; `events` holds what it told since."""

    def __init__(self, path):
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={self.home.name}", "--no-first-run", "--hide-scrollbars"]
        # In the shell, as the browser wants these very numbers; dash has none above 9.
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        shell = shutil.which("bash") or "sh"
        self.process = subprocess.Popen(
            [shell, "-c", script, "sh", path, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._count = 0
        self._session = None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = session
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self):
        try:
            self._session = None
            self.call("Browser.close")
            self.process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self._write)
        os.close(self._read)
        self.home.cleanup()

    def call(self, method, **params):
        """Call a method of the protocol, and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._next(deadline)
            if answer.get("id") != self._count:
                self.events.append(answer)
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            return answer["result"]

    def _next(self, deadline):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium said nothing for {PATIENCE} seconds")
            got = os.read(self._read, 1 << 20)
            if not got:
                raise ConnectionError("Chromium has ended")
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def run(self, script):
        """Run JavaScript in the page, and return what it, or what it promises, comes to."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"]["description"])
        return done["result"].get("value")

    def wait(self, condition):
        """Wait until JavaScript is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{condition} is not so after {PATIENCE} seconds")
            time.sleep(0.02)

    def open(self, text, folder, *, size=(1280, 800), dark=False, still=True):
        """Show a document, as a file, and wait until it has drawn itself in the room that it has.

        Args:
            text: The document.
            folder: Where its file is written.
            size: Of the window, in pixels.
            dark: Whether the system prefers dark.
            still: Whether the system prefers no motion, so that nothing takes time.
        """
        self.resize(*size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, motion])
        path = Path(folder) / "page.html"
        path.write_text(text, encoding="utf-8")
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.wait(
            "document.readyState === 'complete' && document.documentElement.dataset.ready === 'yes'"
        )
        self.frames()

    def frames(self):
        """Wait until all that was asked for is laid out and drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def resize(self, width, height):
        """Give the window another size, in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def move(self, x, y):
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x, y):
        """Click with the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def wheel(self, x, y, down):
        """Turn the wheel."""
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=down)

    def key(self, key, *, ctrl=False):
        """Press and release a key, by what KeyboardEvent.key calls it."""
        text = {"text": key} if len(key) == 1 and not ctrl else {}
        text = {"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" else text
        kinds = ("keyDown", "keyUp")
        for kind in kinds:
            extra = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=2 * ctrl, **extra)

    def type(self, text):
        """Type a text into what has the focus."""
        self.call("Input.insertText", text=text)

    def requests(self):
        """The addresses that were asked for since `open`, that of the page itself left out."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
            and not event["params"]["request"]["url"].endswith("/page.html")
        ]

    def complaints(self):
        """Errors and warnings since `open`: in the console, of scripts, of the page's policy."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            elif event.get("method") == "Runtime.consoleAPICalled":
                found.append(params["args"])
            elif event.get("method") == "Log.entryAdded":
                found.append(params["entry"]["text"])
        return found

    def picture(self, path):
        """Write a screenshot as PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))
