"""Servers for all tests here: ``shoal serve`` of the checkout with the embedded model, and with a
tiny model for images."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
READY_TIMEOUT_S = 120


@dataclass
class Server:
    process: subprocess.Popen
    url: str
    log: Path

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.log.read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/ready"):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise TimeoutError(self.log.read_text())


def start(folder: Path, *flags: str) -> Server:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            # In float32 outputs are equal on all processors except for near ties.
            [ROOT / ".venv/bin/shoal", "serve", "--port", str(port), "--dtype", "float32", *flags],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            env=os.environ | {"SHOAL_MESH_DIR": str(folder / "mesh")},
        )
    return Server(process, f"http://127.0.0.1:{port}", log)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """One serves a model that generates, the other one that pools."""
    writing, pooling = tmp_path_factory.mktemp("writing"), tmp_path_factory.mktemp("pooling")
    both = (
        start(writing, "--batch-dir", str(writing / "batches")),
        start(pooling, "--runner", "pooling"),
    )
    with ready(*both):
        yield both


@contextmanager
def ready(*servers: Server) -> Iterator[None]:
    try:
        for server in servers:
            server.wait_until_ready()
        yield
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGINT)
        for server in servers:
            server.process.wait(60)


@pytest.fixture(scope="session")
def url(servers: tuple[Server, Server]) -> str:
    """The base of OpenAI's endpoints, which clients also find in the environment."""
    os.environ["OPENAI_BASE_URL"] = f"{servers[0].url}/v1"
    os.environ["OPENAI_API_KEY"] = "none"
    return os.environ["OPENAI_BASE_URL"]


@pytest.fixture(scope="session")
def pooling_url(servers: tuple[Server, Server]) -> str:
    return f"{servers[1].url}/v1"


@pytest.fixture(scope="session")
def seeing_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its model is named ``tiny-vl``."""
    folder, model = tmp_path_factory.mktemp("seeing"), tmp_path_factory.mktemp("model")
    save = [ROOT / ".venv/bin/python", "-m", "tests.media.checkpoints", model]
    subprocess.run(save, cwd=ROOT, check=True, capture_output=True)
    server = start(folder, "--model", str(model), "--served-model-name", "tiny-vl")
    with ready(server):
        yield f"{server.url}/v1"
