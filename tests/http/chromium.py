"""Headless Chromium over its DevTools socket: open a page, ask it, press keys, take a picture."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from typing_extensions import Self
from websockets.sync.client import connect

_PR_SET_PDEATHSIG = 1


def executable() -> str | None:
    """Path of a Chromium, None without one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One Chromium with one page; everything of it is gone when the block ends, or the process that opened it.

    Open it in the main thread: the kernel ties Chromium to the thread that started it.
    """

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            program = executable()
            assert program is not None
            flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
            flags += [
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "--window-size=1200,900",
                "--hide-scrollbars",
            ]
            process = subprocess.Popen(
                [program, *flags, "about:blank"],
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509 - it only asks the kernel
            )
            stack.callback(_end, process)
            target = _first_page(process, Path(profile) / "DevToolsActivePort")
            self._socket = stack.enter_context(connect(target, max_size=None, ping_interval=None, proxy=None))
            self._number = 0
            self.problems: list[str] = []
            for domain in ("Page", "Runtime", "Log"):
                self.command(f"{domain}.enable")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One DevTools command; what the page complained about meanwhile is added to ``problems``."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(
                    message["params"]["entry"]["text"] + " " + message["params"]["entry"].get("url", "")
                )
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def ask(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 30) -> Any:
        """Until the expression is truthy; returns it."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.ask(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.ask('document.body.innerText')}"
            time.sleep(0.1)
        return value

    def text(self, selector: str) -> str:
        return self.ask(f"document.querySelector({json.dumps(selector)}).innerText")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13}.get(key, 0)
        extra = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)
            extra = {}

    def prefer(self, scheme: str) -> None:
        """What the system asks for: ``light`` or ``dark``."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> bytes:
        """The whole page as PNG, also written to ``path``."""
        shot = base64.b64decode(
            self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        )
        path.write_bytes(shot)
        return shot


def _first_page(process: subprocess.Popen[bytes], port_file: Path, timeout_s: float = 60) -> str:
    """Address of the DevTools socket of the page that Chromium starts with."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + timeout_s
    while True:
        assert process.poll() is None, "Chromium has ended"
        assert time.monotonic() < deadline, "Chromium does not start"
        with suppress(OSError, IndexError):
            port = port_file.read_text().split()[0]
            pages = json.load(opener.open(f"http://127.0.0.1:{port}/json/list", timeout=30))
            for page in pages:
                if page["type"] == "page":
                    return page["webSocketDebuggerUrl"]
        time.sleep(0.05)


def _die_with(parent: int) -> Callable[[], None]:
    """In the child, before exec: SIGKILL when the parent dies, at once if it is dead already."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _end(process: subprocess.Popen[bytes]) -> None:
    """Chromium and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
