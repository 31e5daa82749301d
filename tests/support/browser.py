"""Headless Chromium, driven over a pipe with its own protocol: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 120.0  # seconds for one answer, on a machine that is busy
# Texts and legends that reach beyond their chart.
OUTSIDE = """
[...document.querySelectorAll("figure svg")].flatMap((svg) => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text, .role-legend path")].filter((node) => {
    const own = node.getBoundingClientRect();
    return own.width > 0 && (own.left < frame.left - 1 || own.right > frame.right + 1
      || own.top < frame.top - 1 || own.bottom > frame.bottom + 1);
  }).map((node) => node.outerHTML.slice(0, 120));
})
"""
# Labels of one axis that say the same or lie on each other.
OVERLAPPING = """
[...document.querySelectorAll(".role-axis-label")].flatMap((axis) => {
  const boxes = [...axis.querySelectorAll("text")]
    .filter((node) => node.getAttribute("opacity") !== "0" && node.textContent)
    .map((node) => [node.getBoundingClientRect(), node.textContent]);
  return boxes.slice(1).filter(([box, text], place) => {
    const [before, said] = boxes[place];
    return said === text || (box.left < before.right && before.left < box.right
      && box.top < before.bottom && before.top < box.bottom);
  }).map(([, text]) => text);
})
"""
TOLD = "(document.querySelector('#vg-tooltip-element.visible')?.innerText ?? '')"


def find_browser() -> str:
    """Return the path of Chromium, or skip; in CI it must be there."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is not None:
        return found
    missing = "there is no Chromium: apt-get install chromium"
    if os.environ.get("FLOWER_VFL_REQUIRE_BROWSER"):
        pytest.fail(missing)
    pytest.skip(missing)


class Page:
    """One page of a browser."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.problems: list[str] = []  # errors of scripts, refused requests
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]
            self._note(reply)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._receive], [], [], max(left, 0.0))
            assert ready, "the browser does not answer"
            more = os.read(self._receive, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        first, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(first)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith("file:"):
                self.problems.append(f"asked for {url[:80]}")

    def open(self, path: Path, width: int = 1280, dark: bool = False) -> None:
        """Open a file and wait until it is loaded."""
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **screen, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        where = f"location.href === {json.dumps(path.resolve().as_uri())}"
        self.wait(f"{where} && document.readyState === 'complete'")

    def wait(self, script: str) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        names = {" ": "Space"}
        what = {
            "key": key,
            "code": names.get(key, key),
            "text": key if key == " " else "",
        }
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **what)

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        find = f"document.querySelector({json.dumps(selector)})"
        box = self.run(
            f"(() => {{ const e = {find}; e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        self.move(*box)
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **at)

    def scroll(self, x: float, y: float, distance: float, shift: bool) -> None:
        """Turn the wheel, with or without the Shift key."""
        turned = {"deltaX": 0, "deltaY": distance, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, **turned)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"]}
        shot = self.call(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip=clip | {"scale": 1},
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        """Print the page."""
        printed = self.call("Page.printToPDF", preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(printed["data"]))


@contextmanager
def browser_page() -> Iterator[Page]:
    """Start a browser; it ends with the block."""
    command = find_browser()
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads commands from descriptor 3 and answers on 4.
        script = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        process = subprocess.Popen(
            [
                *("bash", "-c", script, command, "--headless", "--no-sandbox"),
                *("--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
                *("--remote-debugging-pipe", f"--user-data-dir={profile}"),
            ],
            pass_fds=(to_browser[0], from_browser[1]),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Page(to_browser[1], from_browser[0])
        finally:
            process.kill()
            process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])


def box(kind: str, value: str) -> str:
    return f'input[data-kind="{kind}"][data-value="{value}"]'


def count(page: Page, selector: str) -> int:
    query = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return int(page.run(f"{query}.filter(n => n.getClientRects().length).length"))


def middle(page: Page, selector: str) -> tuple[float, float]:
    """Scroll to an element and return its middle."""
    x, y = page.run(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
        "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
        "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    return x, y


def draw(page: Page, report: Path, width: int = 1280, dark: bool = False) -> None:
    page.open(report, width, dark)
    page.wait("document.body.dataset.drawn === 'yes'")
