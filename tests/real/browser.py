"""A real Chromium without a window, driven over its DevTools protocol: Prefect's forms as a person sees them."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.real.slurm_daemons import free_ports

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
WAIT_SECONDS = 60.0


def browser_missing_reason() -> str | None:
    """Why there is no browser; None when there is one."""
    found = any(map(shutil.which, PROGRAMS))
    return None if found else "Chromium is not installed: apt-get install chromium-headless-shell"


class Page:
    """One tab."""

    def __init__(self, socket: Connection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer: dict[str, Any] = json.loads(self._socket.recv(timeout=WAIT_SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        """Go to a page; `wait` tells when it is there."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Ask until an expression of the page is true, and return it."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"not there: {expression}\n{self.text()}"
            time.sleep(0.2)
        return found

    def text(self) -> str:
        """What a person reads on it."""
        return str(self.evaluate("document.body.innerText"))

    def wait_text(self, words: str) -> None:
        """Wait until the page says this."""
        self.wait(f"!!document.body && document.body.innerText.includes({json.dumps(words)})")

    def click(self, words: str) -> None:
        """Click the last button or link that says exactly this."""
        self.focus(
            f"[...document.querySelectorAll('button, a')].filter(e => e.innerText.trim() === {json.dumps(words)}).at(-1)"
        )
        self.evaluate("document.activeElement.click()")

    def focus(self, find: str) -> None:
        """Give the focus to the element that an expression finds; a notice of the UI may cover it."""
        self.wait(f"!!({find})")
        self.evaluate(f"({find}).focus()")

    def field(self, name: str) -> str:
        """The expression of the input of a form's field."""
        return (
            f"(() => {{ const titles = {json.dumps([name, f'{name} (Optional)'])};"
            " let e = [...document.querySelectorAll('label, span, div')]"
            ".find(e => titles.includes(e.innerText.trim()));"
            " while (e && !e.querySelector('textarea, select, input[type=text]')) e = e.parentElement;"
            " return e && e.querySelector('textarea, select, input[type=text]'); })()"
        )

    def type(self, name: str, text: str) -> None:
        """Type a text into a field that is empty."""
        self.focus(self.field(name))
        self.call("Input.insertText", text=text)

    def choose(self, name: str, *choices: str) -> None:
        """Choose these of a field's choices, and no other."""
        self.wait(f"!!{self.field(name)}")
        chosen = self.evaluate(
            f"(() => {{ const s = {self.field(name)}, wanted = {json.dumps(choices)};"
            " for (const o of s.options) o.selected = wanted.includes(o.text.trim());"
            " s.dispatchEvent(new Event('change', {bubbles: true})); return s.selectedOptions.length; })()"
        )
        assert chosen == len(choices), f"{name}: not all of {choices} can be chosen"


@contextlib.contextmanager
def browser(folder: Path, *, width: int = 1200, height: int = 900) -> Iterator[Page]:
    """Start a browser with a profile in a folder, and end it."""
    program = next(path for path in map(shutil.which, PROGRAMS) if path)
    (port,) = free_ports(1)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--window-size={width},{height}"]
    command = [program, *options, f"--remote-debugging-port={port}", f"--user-data-dir={folder}", "about:blank"]
    # Debian's command is a script that waits for the browser: both are one session, and end together.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        with connect(_tab(port), max_size=None) as socket:
            yield Page(socket)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def _tab(port: int) -> str:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=5) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
                return str(tabs[0]["webSocketDebuggerUrl"])
        except (OSError, IndexError):
            assert time.monotonic() < deadline, "the browser does not start"
            time.sleep(0.1)
