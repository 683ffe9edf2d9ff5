"""`shoal probe` against the admin port of a service in this process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cli.probe import main
from shared.process.admin import AdminServer
from shared.settings.scheduler import SchedulerConfig
from shared.wire.messages import Heartbeat, State


class Handler(Any):
    state = State.NOT_READY

    def status(self) -> Heartbeat:
        return Heartbeat(self.state, "no worker is connected", 0, 0)


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
async def admin(tmp_path: Path, handler: Handler, unused_tcp_port: int, monkeypatch):
    monkeypatch.setenv("SHOAL_ADMIN_PORT", str(unused_tcp_port))
    config = SchedulerConfig(mesh_dir=tmp_path, admin_port=unused_tcp_port)
    async with AdminServer(handler, "scheduler", config) as server:
        yield server


async def probe(*arguments: str) -> int:
    return await asyncio.to_thread(main, list(arguments))


async def test_a_probe_prints_why_a_service_is_not_ready(
    admin: AdminServer, handler: Handler, capsys
):
    for path in ("/health", "/ready"):
        assert await probe(path) == 1
        assert "no worker is connected" in capsys.readouterr().out
    handler.state = State.READY
    assert await probe() == await probe("/ready") == 0
    admin.has_started = True
    handler.state = State.NOT_READY
    assert await probe("/ready") == 1
    assert await probe() == 0, "a service that waits for another is alive"


async def test_a_probe_asks_the_address_of_the_url(
    admin: AdminServer, unused_tcp_port: int, handler: Handler, monkeypatch, capsys
):
    port = unused_tcp_port
    handler.state = State.READY
    monkeypatch.delenv("SHOAL_ADMIN_PORT")
    assert await probe(f"http://127.0.0.1:{port}/status") == 0
    assert '"service": "scheduler"' in capsys.readouterr().out
    assert await probe(f"http://127.0.0.1:{port}") == 0


async def test_a_service_that_does_not_answer_is_an_error(
    unused_tcp_port: int, monkeypatch, capsys
):
    monkeypatch.setenv("SHOAL_ADMIN_PORT", str(unused_tcp_port))
    assert await probe("/ready") == 2
    assert f"127.0.0.1:{unused_tcp_port} does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "usage"),
        (["http://x:y/"], "usage"),
        ([], "SHOAL_ADMIN_PORT is not set; give a URL, such as http://"),
    ],
)
def test_wrong_arguments_are_an_error(arguments, message, monkeypatch, capsys):
    monkeypatch.delenv("SHOAL_ADMIN_PORT", raising=False)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
