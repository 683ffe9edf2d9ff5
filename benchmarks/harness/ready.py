"""Waits for server processes until they answer over HTTP."""

import asyncio
from collections.abc import Callable

import aiohttp

POLL_S = 0.05
NUM_LINES_TOLD = 20


async def until_ready(
    url: str,
    process: asyncio.subprocess.Process,
    told: Callable[[], str] = str,
    *,
    connector: aiohttp.BaseConnector | None = None,
    timeout_s: float = 90,
) -> None:
    """Raises RuntimeError with the end of the log ``told`` if ``process`` ends before."""
    async with asyncio.timeout(timeout_s), aiohttp.ClientSession(connector=connector) as session:
        while not await _is_ready(session, url):
            if process.returncode is not None:
                lines = told().splitlines()[-NUM_LINES_TOLD:]
                raise RuntimeError("\n".join([f"{url} did not become ready:", *lines]))
            await asyncio.sleep(POLL_S)


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    """Other servers have no /ready, and answer /health with an error until their model is loaded;
    our gateway is healthy before a worker is connected."""
    try:
        for path in ("/ready", "/health"):
            async with session.get(url + path) as response:
                if response.status not in (200, 404):
                    return False
    except aiohttp.ClientError:
        return False
    return True
