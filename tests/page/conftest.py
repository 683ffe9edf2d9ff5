"""The page in a browser: ``shoal serve`` of the checkout with two workers, and Chromium."""

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from benchmarks.harness.ports import free_port

ROOT = Path(__file__).parent.parent.parent
READY_TIMEOUT_S = 120
# In float32 outputs are equal on all processors except for near ties. The automatic number of
# drafts depends on the machine's load.
ALIKE_EVERYWHERE = ("--dtype", "float32", "--speculative-config", '{"adaptive": false}')
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

expect.set_options(timeout=20_000)


@dataclass
class Served:
    url: str
    directory: Path
    log: Path
    server: subprocess.Popen


@contextmanager
def serving(*flags: str) -> Iterator[Served]:
    port = free_port()
    with TemporaryDirectory(prefix="shoal-") as name, Path(name, "log").open("wb") as log:
        server = subprocess.Popen(
            [ROOT / ".venv/bin/shoal", "serve", "--port", str(port), *ALIKE_EVERYWHERE, *flags],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env={"SHOAL_NUM_THREADS": "1", "SHOAL_SCHEDULERS": "1"}
            | os.environ
            | {"SHOAL_MESH_DIR": f"{name}/mesh"},
        )
        try:
            served = Served(
                f"http://127.0.0.1:{port}/", Path(name, "mesh"), Path(name, "log"), server
            )
            until_ready(server, f"{served.url}ready", served.log)
            yield served
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def until_ready(server: subprocess.Popen, address: str, log: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(address):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise TimeoutError(log.read_text())


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving("--workers", "2") as served:
        yield served


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = [path for path in map(shutil.which, BROWSERS) if path]
    assert found, "no Chromium; on Debian: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found[0], args=["--no-sandbox"] if os.getuid() == 0 else []
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with opened(browser, served.url) as page:
        yield page


@contextmanager
def opened(browser: Browser, url: str, *, width: int = 1280, **options: object) -> Iterator[Page]:
    """A page that knows a model. Its exceptions and violations are errors here."""
    context = browser.new_context(viewport={"width": width, "height": 800}, **options)
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.goto(url)
    try:
        yield page
    finally:
        context.close()
    expected = tuple(
        f"Failed to load resource: {each}"
        for each in ("the server responded with a status of 4", "net::ERR_")
    )
    assert not [each for each in problems if not each.startswith(expected)]
