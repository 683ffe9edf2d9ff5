"""A private mesh for one process, unusable for others."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from pydantic import SecretStr

from cli.run_directory import RunDirectory
from cli.supervisor import Supervisor
from shared.settings.serve import ServeConfig

POLL_S = 0.1


@asynccontextmanager
async def own_mesh(
    config: ServeConfig, on_line: Callable[[str], None]
) -> AsyncIterator[aiohttp.ClientSession]:
    """Yields a session with a mesh that is ready. Raises ConfigError, and an ExceptionGroup of
    StartFailedError if it does not start."""
    directory = RunDirectory(config.mesh_dir)
    socket, key = directory.path / "http.sock", secrets.token_hex()
    try:
        supervisor = Supervisor(_private(config, socket, key), directory, on_line)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(supervisor.run(lambda: None))
            async with _session(socket, key) as session:
                await _until_ready(session)
                yield session
            running.cancel()
    finally:
        directory.remove()


def _private(config: ServeConfig, socket: Path, key: str) -> ServeConfig:
    """The settings without public endpoints. A batch can wait for a scheduler's restart, and nobody
    watches its streams."""
    own = {"uds": socket, "api_key": [SecretStr(key)], "gateways": 1, "admin_token": SecretStr(key)}
    own["response_store_bytes"] = 0
    defaults = {"schedulers": 1, "min_stream_rate": 0.0}
    own |= {name: defaults[name] for name in defaults.keys() - config.model_fields_set}
    others = ("api_key_file", "ssl_certfile", "ssl_keyfile", "batch_dir", "ttft_ms", "tpot_ms")
    return config.model_copy(update=own | dict.fromkeys(others))


def _session(socket: Path, key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        "http://mesh",
        connector=aiohttp.UnixConnector(str(socket), limit=0),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )


async def _until_ready(session: aiohttp.ClientSession) -> None:
    while True:
        try:
            async with session.get("/ready") as response:
                if response.status == 200:
                    return
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(POLL_S)
