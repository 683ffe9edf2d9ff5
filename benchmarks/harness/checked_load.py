"""Clients that stream continuously and compare every output with the expected one."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

TIMEOUT = aiohttp.ClientTimeout(sock_read=120)
PROMPTS = ("def add(", "The scheduler", "import os\n", "class Fish:", "Once upon", "for i in")


def body_of(number: int, max_tokens: int) -> dict:
    """A request with a fixed seed, so that the answer is always the same."""
    return {
        "prompt": PROMPTS[number % len(PROMPTS)] + f" {number}",
        "max_tokens": max_tokens - number % 7,
        "temperature": 0 if number % 2 else 0.8,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # an event for each token, also for tokens without text
    }


class StreamError(Exception):
    """A stream did not end as expected."""


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict, times_s: list[float] | None = None
) -> str:
    """The text of a stream that ends as expected: once, with all its tokens, usage and [DONE].

    Appends to ``times_s`` when the request was sent and when each event with tokens arrived.
    """
    text, reasons, is_done = "", [], False
    usage: dict[str, int] = {}
    times_s = [] if times_s is None else times_s
    times_s.append(time.monotonic())
    async with session.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT) as response:
        if response.status != 200:
            raise StreamError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if not data or data.startswith(b":"):  # a keep-alive comment
                continue
            if is_done:
                raise StreamError(f"after [DONE] came {data[:80]!r}")
            is_done = data == b"[DONE]"
            event = {} if is_done else json.loads(data)
            if "error" in event:
                raise StreamError(str(event["error"]))
            usage = event.get("usage") or usage
            if event.get("choices"):
                times_s.append(time.monotonic())
            for choice in event.get("choices", ()):
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    if not is_done or reasons != ["length"]:
        raise StreamError(f"the end of the stream is {reasons}, [DONE]: {is_done}")
    if usage["completion_tokens"] != body["max_tokens"]:
        raise StreamError(f"{usage['completion_tokens']} tokens of {body['max_tokens']}")
    return text


@dataclass
class Load:
    """``num`` clients that send request after request, each to the address of ``pick_url``.

    A failed request is not counted if its gateway is in ``lost_urls``. ``times_s`` holds for each
    stream the time of the request and of each token.
    """

    num: int
    max_tokens: int
    pick_url: Callable[[int], str]
    texts: dict[int, str] = field(default_factory=dict)
    lost_urls: set[str] = field(default_factory=set)
    num_good: int = 0
    failures: list[str] = field(default_factory=list)
    differences: list[int] = field(default_factory=list)
    times_s: list[list[float]] = field(default_factory=list)
    is_over: bool = False

    async def learn(self) -> None:
        """Records the expected outputs, with all services undisturbed."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            bodies = [body_of(number, self.max_tokens) for number in range(self.num)]
            texts = await asyncio.gather(
                *(stream(session, self.pick_url(index), body) for index, body in enumerate(bodies))
            )
        self.texts = dict(enumerate(texts))

    async def run(self) -> None:
        """Runs until ``is_over``; each client finishes its current stream."""
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(self.num):
                tasks.create_task(self._client(session, number))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self.is_over:
            url = self.pick_url(number)
            times_s: list[float] = []
            self.times_s.append(times_s)
            try:
                text = await stream(session, url, body_of(number, self.max_tokens), times_s)
            except (StreamError, aiohttp.ClientError, TimeoutError) as error:
                if url not in self.lost_urls:
                    self.failures.append(f"{number}: {error!r}")
                await asyncio.sleep(0.1)
                continue
            self.num_good += 1
            if text != self.texts[number]:
                self.differences.append(number)
