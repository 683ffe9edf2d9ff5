"""The runner of a service: signals, exit codes, the admin port."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.errors import ConfigError, LostError
from shared.link.address import admin_path
from shared.process import service as runner
from shared.settings.scheduler import SchedulerConfig
from shared.wire.messages import Heartbeat, State


class Idle:
    """A service that does nothing until a test sets its state; ``how`` is the kind of failure."""

    def __init__(self, how: str = "") -> None:
        self.how = how
        self.state = State.NOT_READY
        self.has_drained = False

    async def run(self) -> None:
        match self.how:
            case "raises":
                raise RuntimeError("a broken invariant")
            case "loses a rank":
                raise LostError("rank 1 is gone")
            case "wrong setting":
                raise ConfigError("port: 1: in use")
            case "callback raises":
                asyncio.get_running_loop().call_soon(self.broken_callback)
            case "forgets a task":
                asyncio.create_task(self.broken_task())  # noqa: RUF006
        await asyncio.Event().wait()

    def broken_callback(self) -> None:
        raise RuntimeError("a broken invariant, in a callback")

    async def broken_task(self) -> None:
        raise RuntimeError("a task that nobody waits for")

    async def drain(self) -> None:
        self.has_drained = True
        if self.how == "drains for ever":
            await asyncio.Event().wait()

    def status(self) -> Heartbeat:
        return Heartbeat(self.state, "it only idles", 3, 4)


def config(directory: Path) -> SchedulerConfig:
    return SchedulerConfig(mesh_dir=directory, instance="0", drain_timeout_s=0.2)


async def run(service: Any, directory: Path) -> int:
    return await runner._run("scheduler", config(directory), lambda _: service, lambda: None)


async def until_it_serves(directory: Path) -> None:
    while not admin_path(directory, "scheduler", "0").exists():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["", "drains for ever"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_within_the_time_and_exits_with_0(tmp_path: Path, how, number):
    service = Idle(how)
    running = asyncio.create_task(run(service, tmp_path))
    await until_it_serves(tmp_path)
    os.kill(os.getpid(), number)
    assert await asyncio.wait_for(running, 10) == 0
    assert service.has_drained
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(autouse=True)
def _garbage_is_searched_everywhere() -> Iterator[None]:
    yield
    gc.unfreeze()


async def test_objects_of_a_ready_service_are_frozen_for_the_collector(tmp_path: Path):
    service = Idle()
    running = asyncio.create_task(run(service, tmp_path))
    await until_it_serves(tmp_path)
    assert gc.get_freeze_count() == 0
    service.state = State.READY
    async with asyncio.timeout(10):
        while gc.get_freeze_count() < 1000:
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 10) == 0


async def test_the_error_of_a_forgotten_task_is_logged_and_ends_nothing(tmp_path: Path, caplog):
    running = asyncio.create_task(run(Idle("forgets a task"), tmp_path))
    async with asyncio.timeout(10):
        while "a task that nobody waits for" not in caplog.text:
            await asyncio.sleep(0.01)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 10) == 0


async def test_memory_that_runs_out_in_a_transport_ends_that_alone(tmp_path: Path, caplog):
    """As reported by uvloop, after it has closed the transport."""
    running = asyncio.create_task(run(Idle(), tmp_path))
    await until_it_serves(tmp_path)
    context = {"message": "Fatal error on transport TCPTransport", "exception": MemoryError()}
    asyncio.get_running_loop().call_exception_handler(context | {"transport": object()})
    await asyncio.sleep(0.05)
    assert "Fatal error on transport" in caplog.text
    assert not running.done()
    asyncio.get_running_loop().call_exception_handler(context)
    assert await asyncio.wait_for(running, 10) != 0


async def test_a_service_signals_once_that_it_is_ready(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(runner, "LOOK_S", 0.001)
    caplog.set_level(logging.INFO)
    service = Idle()
    running = asyncio.create_task(run(service, tmp_path))
    await until_it_serves(tmp_path)
    await asyncio.sleep(0.02)
    assert "ready" not in caplog.messages
    for state in (State.READY, State.NOT_READY, State.READY):
        service.state = state
        await asyncio.sleep(0.02)
    async with asyncio.timeout(10):
        while "ready" not in caplog.messages:
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 10) == 0
    assert caplog.messages.count("ready") == 1


@pytest.mark.parametrize(
    ("how", "code", "is_our_fault"),
    [
        ("raises", 1, True),
        ("callback raises", 1, True),
        ("loses a rank", 1, False),
        ("wrong setting", 2, False),
    ],
)
async def test_the_error_of_a_service_decides_its_exit_code(
    tmp_path: Path, how: str, code: int, is_our_fault: bool, capfd, caplog
):
    assert await asyncio.wait_for(run(Idle(how), tmp_path), 10) == code
    assert ("Traceback" in caplog.text) == is_our_fault
    if code == 2:
        assert capfd.readouterr().err == "shoal scheduler: port: 1: in use\n"
    assert ("rank 1 is gone" in caplog.text) == (how == "loses a rank")


async def test_the_admin_port_serves_health_readiness_status_and_metrics(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    service = Idle()
    running = asyncio.create_task(run(service, tmp_path))
    await until_it_serves(tmp_path)
    connector = aiohttp.UnixConnector(str(admin_path(tmp_path, "scheduler", "0")))
    async with aiohttp.ClientSession("http://admin", connector=connector) as session:
        async with session.get("/health") as response:
            assert response.status == 503, "it has not been ready yet"
        async with session.get("/ready") as response:
            assert response.status == 503
            assert await response.json() == {"ready": False, "reason": "it only idles"}
        async with session.get("/status") as response:
            status = await response.json()
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        assert "shoal_ready 0.0" in lines
        service.state = State.READY
        async with session.get("/metrics") as response:
            assert "shoal_ready 1.0" in (await response.text()).splitlines()
        async with asyncio.timeout(10):
            while "ready" not in caplog.messages:
                await asyncio.sleep(0.01)
        service.state = State.NOT_READY
        async with session.get("/health") as response:
            assert response.status == 200, "it was ready, though there was no request at the time"
    assert (status["state"], status["load"], status["num_steps"]) == ("not_ready", 3, 4)
    who = f'instance="0",service="scheduler",version="{version("shoal")}"'
    assert f"shoal_service_info{{{who}}} 1.0" in lines
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 10)
