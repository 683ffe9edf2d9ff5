"""A server for all tests here: ``shoal serve`` of the checkout, with the embedded model."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
READY_TIMEOUT_S = 120


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base of OpenAI's endpoints, which clients find in the environment, too."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            # In float32 texts are the same on all processors but for near ties.
            [ROOT / ".venv/bin/shoal", "serve", "--port", str(port), "--dtype", "float32"],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            env=os.environ | {"SHOAL_MESH_DIR": str(log.parent / "mesh")},
        )
    try:
        until_ready(server, f"http://127.0.0.1:{port}/ready", log)
        os.environ["OPENAI_BASE_URL"] = f"http://127.0.0.1:{port}/v1"
        os.environ["OPENAI_API_KEY"] = "none"
        yield os.environ["OPENAI_BASE_URL"]
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
