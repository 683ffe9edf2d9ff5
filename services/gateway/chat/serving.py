"""The common work of all endpoints with computations in the mesh."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from services.gateway.http.account import ACCOUNT
from services.gateway.http.client import Client
from services.gateway.http.pieces import PieceMaker
from services.gateway.http.request_log import METER
from services.gateway.http.request_meter import RequestMeter
from shared.errors import RETRY_AFTER_S, Unavailable

JSON_HEADERS = {"Content-Type": "application/json"}
WARNINGS = "X-Shoal-Warnings"
"""Header that names ignored fields of a request."""


def start_meter(request: web.Request, model: str, started_s: float) -> RequestMeter:
    """Measures ``request`` from ``started_s`` on, for the log too, and charges its key."""
    meter = request[METER] = RequestMeter(model, started_s)
    if (account := request.get(ACCOUNT)) is not None:
        meter.charge = account.charge
    return meter


def warn(response: web.StreamResponse, warnings: Sequence[str]) -> None:
    """Puts the warnings into a header of a reply that has not begun."""
    if warnings:
        response.headers[WARNINGS] = ", ".join(warnings)


@asynccontextmanager
async def accepting(timeout_s: float) -> AsyncIterator[None]:
    """Raises Unavailable after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise Unavailable(
            f"not accepted within {timeout_s:g} s", retry_after_s=RETRY_AFTER_S
        ) from None


async def send_json(
    client: Client, written: Iterator[bytes], maker: PieceMaker, *, is_large: bool
) -> None:
    """A large body is written in pieces, in turn with the event loop, without a known length."""
    if is_large:
        await client.begin(JSON_HEADERS)
        await maker.send(written, client.write)
    else:
        body = b"".join(written)
        await client.begin({**JSON_HEADERS, "Content-Length": str(len(body))})
        await client.write(body)
