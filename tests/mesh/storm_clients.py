"""Clients of a mesh in a storm: they retry temporary refusals, and every received output must be
right."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.harness.checked_load import TIMEOUT, body_of
from shared.errors import DEADLY, QUARANTINED
from tests.mesh.storm import Storm

BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": [9000]},
    {"prompt": "x" * 50_000},
    {"prompt": []},
    {"stop": 7},
)
NUM_BODIES = 24
NUM_WIDE = 4  # clients with large replies, which make the mesh wait for slow readers
MAX_REFUSED_S = 90
SLOW_READ_BYTES = 1 << 16


class WrongAnswer(Exception):
    """A reply no server may give, even after losses."""


class Refused(Exception):
    """A documented error."""

    def __init__(self, status: int, code: str, retry_after_s: float) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


def events_of(text: str) -> list[dict[str, Any]]:
    *lines, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), text[-500:]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def make_body(number: int, is_stream: bool) -> dict[str, Any]:
    if number < NUM_WIDE:
        body = body_of(number, 16) | {"logprobs": -1}
    else:
        body = body_of(number, 40) | {"n": 1 + number % 2}
    if not is_stream:
        del body["stream_options"]
    return body | {"stream": is_stream}


@asynccontextmanager
async def connected() -> AsyncIterator[aiohttp.ClientSession]:
    """A connection for each request: a leaving gateway may have closed the old one."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as session:
        yield session


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], pause_s: float = 0
) -> tuple[str, ...]:
    """The output of each choice; ``pause_s`` before each part of the reply is read. Raises Refused,
    WrongAnswer."""
    address = f"{url}/v1/completions"
    async with session.post(address, json=body, read_bufsize=SLOW_READ_BYTES) as response:
        data = b""
        while part := await response.content.readany():
            data += part
            await asyncio.sleep(pause_s)
        if response.status != 200:
            raise _refusal(response.status, response.headers, json.loads(data)["error"])
    return _texts(data.decode(), body)


def _refusal(status: int, headers: Any, error: dict[str, Any]) -> Exception:
    code, is_for_now = error["code"], status in (429, 503) or error["code"] == QUARANTINED
    if is_for_now and "Retry-After" not in headers:
        return WrongAnswer(f"{status} without Retry-After: {error}")
    if is_for_now or code in DEADLY or status == 400:
        return Refused(status, code, float(headers.get("Retry-After", 0)))
    return WrongAnswer(f"{status}: {error}")


def _texts(data: str, body: dict[str, Any]) -> tuple[str, ...]:
    try:
        objects = events_of(data) if body["stream"] else [json.loads(data)]
    except (AssertionError, ValueError) as error:
        raise WrongAnswer(f"the reply is cut off: {error}"[:500]) from None
    texts, reasons, usage = [""] * body.get("n", 1), Counter[int](), None
    for each in objects:
        if "error" in each:
            code = each["error"]["code"]
            raise Refused(200, code, 0) if code in DEADLY else WrongAnswer(f"{each['error']}")
        usage = each.get("usage") or usage
        for choice in each["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] += choice["finish_reason"] == "length"
    num_tokens = len(texts) * body["max_tokens"]
    if usage is None or usage["completion_tokens"] != num_tokens:
        raise WrongAnswer(f"usage is {usage}, {num_tokens} tokens were asked for")
    if any(reasons[index] != 1 for index in range(len(texts))):
        raise WrongAnswer(f"choices ended so often: {reasons}")
    return tuple(texts)


@dataclass
class Clients:
    """``num`` clients, until ``is_over``. ``ends`` counts outcomes; ``wrong`` describes unexpected
    ones."""

    storm: Storm
    num: int
    texts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    is_over: bool = False

    async def learn(self) -> None:
        """Records the right outputs, undisturbed; each is the same as a stream and whole."""
        for is_stream in (True, False):
            async with connected() as session:
                bodies = [make_body(number, is_stream) for number in range(NUM_BODIES)]
                urls = self.storm.urls
                texts = await asyncio.gather(
                    *(ask(session, urls[i % len(urls)], body) for i, body in enumerate(bodies))
                )
            assert self.texts in ({}, dict(enumerate(texts)))
            self.texts = dict(enumerate(texts))

    async def run(self) -> None:
        async with connected() as session, asyncio.TaskGroup() as tasks:
            for number in range(self.num):
                dice = random.Random(f"{self.storm.seed} client {number}")
                tasks.create_task(self._client(session, dice))

    async def _client(self, session: aiohttp.ClientSession, dice: random.Random) -> None:
        while not self.is_over:
            number, is_stream = dice.randrange(NUM_BODIES), dice.random() < 0.5
            manner = dice.choices(("reads", "reads slowly", "leaves", "errs"), (70, 10, 12, 8))[0]
            until_s = dice.uniform(0, 1.5) if manner == "leaves" else None
            pause_s = dice.uniform(0.01, 0.1) if manner == "reads slowly" else 0
            body = make_body(number, is_stream) if manner != "errs" else dice.choice(BAD_BODIES)
            expected = None if manner == "errs" else self.texts[number]
            try:
                async with asyncio.timeout(until_s):
                    await self._until_answered(session, body, expected, pause_s)
                self.ends[manner] += 1
            except TimeoutError:
                if until_s is None:
                    self.wrong.append(f"no end: {body}")
                self.ends["has left"] += 1
            except (WrongAnswer, Refused, aiohttp.ClientError) as error:
                self.wrong.append(f"{self.storm.now_s:.1f} s: {error!r} for {body}")

    async def _until_answered(
        self,
        session: aiohttp.ClientSession,
        body: dict[str, Any],
        expected: tuple[str, ...] | None,
        pause_s: float,
    ) -> None:
        """Retries after a refusal with Retry-After, or after the gateway was killed."""
        began_s = time.monotonic()
        while True:
            url, asked_s = await self.storm.next_url(), self.storm.now_s
            try:
                texts = await ask(session, url, body, pause_s)
            except Refused as error:
                if expected is None and error.status == 400:
                    return
                self._check_refusal(error, asked_s)
                if time.monotonic() - began_s > MAX_REFUSED_S:
                    raise
                await asyncio.sleep(error.retry_after_s)
            except (WrongAnswer, aiohttp.ClientError):
                if url not in self.storm.lost_urls:
                    raise
                self.ends["gateway killed"] += 1
            else:
                if texts != expected:
                    raise WrongAnswer(f"{texts} instead of {expected}")
                return

    def _check_refusal(self, error: Refused, asked_s: float) -> None:
        """Raises the refusal, unless it is temporary or the blamed services were lost."""
        self.ends[f"refused: {error}"] += 1
        is_for_now = error.status in (429, 503) or error.code == QUARANTINED
        if not is_for_now and not self.storm.explains(error.code, asked_s):
            raise error
