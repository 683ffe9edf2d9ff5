"""Clients that stream, or that send prompts, in a process of their own.

``python -m benchmarks.harness.stream_clients URL CLIENTS``, with ``Clients`` as JSON, sends one
request after another from each client until its stdin ends; prints the Records as a JSON list.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from random import Random
from time import perf_counter
from typing import Any, Literal

import aiohttp
import msgspec
import uvloop

from cli.bench.workload import FIRST_ID

VOCAB_SIZE = 1000
"""Prompts have ids below it: any model's vocabulary is larger."""


class Clients(msgspec.Struct, kw_only=True):
    """A prompt has ``min_len`` to ``max_len`` random tokens, the answer ``max_tokens``."""

    kind: Literal["streams", "prompts"]
    num: int
    seed: int
    min_len: int
    max_len: int
    max_tokens: int


class Record(msgspec.Struct, kw_only=True):
    """A request. ``chunks``: the time of each chunk with tokens, and their number.

    Times are from ``perf_counter``, one clock for all processes of a machine.
    """

    client: int
    num_prompt_tokens: int
    sent_s: float
    chunks: list[tuple[float, int]] = msgspec.field(default_factory=list)
    is_over: bool = False


Ask = Callable[[aiohttp.ClientSession, dict[str, Any], Record], Awaitable[None]]


async def _stream(session: aiohttp.ClientSession, body: dict[str, Any], record: Record) -> None:
    """With ``return_token_ids`` tokens without text have a chunk too."""
    body |= {"stream": True, "return_token_ids": True}
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line.removeprefix(b"data: "))
                num_tokens = sum(len(each.get("token_ids") or ()) for each in event["choices"])
                if num_tokens:
                    record.chunks.append((perf_counter(), num_tokens))


async def _answer(session: aiohttp.ClientSession, body: dict[str, Any], record: Record) -> None:
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        await response.read()
    record.chunks.append((perf_counter(), body["max_tokens"]))


KINDS: dict[str, Ask] = {"streams": _stream, "prompts": _answer}


async def _ask_on(
    session: aiohttp.ClientSession, clients: Clients, client: int, records: list[Record]
) -> None:
    dice = Random(f"{clients.kind} {clients.seed} {client}")
    while True:
        num_tokens = dice.randint(clients.min_len, clients.max_len)
        ids = [dice.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(num_tokens)]
        body = {"prompt": ids, "max_tokens": clients.max_tokens, "temperature": 0}
        record = Record(client=client, num_prompt_tokens=num_tokens, sent_s=perf_counter())
        records.append(record)
        await KINDS[clients.kind](session, body | {"ignore_eos": True}, record)
        record.is_over = True


async def main(url: str, clients: Clients) -> list[Record]:
    """Raises ClientError if a request fails."""
    records: list[Record] = []
    async with (
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        tasks = [
            group.create_task(_ask_on(session, clients, client, records))
            for client in range(clients.num)
        ]
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
    return records


if __name__ == "__main__":
    clients = msgspec.json.decode(sys.argv[2], type=Clients)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(main(sys.argv[1], clients))))
