"""Requests of every kind at random times, and their outcomes."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np

from cli.bench.arrivals import Times, at_rate
from cli.bench.client import NOT_A_REPLY, PATHS
from cli.bench.stream import Stream, StreamError, message_of_body
from cli.bench.workload import WORDS

MAX_TOKENS = 16
MAX_WORDS = 24
SHARE_STREAMED = 0.5
SHARE_LOGPROBS = 0.2
SHARE_LEAVES = 0.1
SHARE_WRONG = 0.05
MAX_STAY_S = 0.1  # of clients that leave: before some answers are complete
TIMEOUT = aiohttp.ClientTimeout(total=120)
WRONG_FIELDS: tuple[dict[str, Any], ...] = (
    {"n": 0},
    {"temperature": 9},
    {"stop": 7},
    {"model": "nobody"},
)


@dataclass(frozen=True)
class Ask:
    """One request: its client leaves after ``stays_s``, and expects ``status``."""

    endpoint: str
    body: dict[str, Any]
    stays_s: float | None
    status: int

    @classmethod
    def at_random(cls, dice: Random) -> "Ask":
        endpoint = dice.choice(list(PATHS))
        body = _prompt(dice, endpoint) | {
            "max_tokens": dice.randint(1, MAX_TOKENS),
            "temperature": dice.choice((0, 0.8)),
        }
        if dice.random() < SHARE_STREAMED:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if dice.random() < SHARE_LOGPROBS:
            is_chat = endpoint == "chat"
            body |= {"logprobs": True, "top_logprobs": 5} if is_chat else {"logprobs": 5}
        if dice.random() < SHARE_WRONG:
            wrong = dice.choice(WRONG_FIELDS)
            return cls(endpoint, body | wrong, None, 404 if "model" in wrong else 400)
        stays_s = dice.uniform(0, MAX_STAY_S) if dice.random() < SHARE_LEAVES else None
        return cls(endpoint, body, stays_s, 200)


def _prompt(dice: Random, endpoint: str) -> dict[str, Any]:
    text = " ".join(dice.choices(WORDS, k=dice.randint(1, MAX_WORDS)))
    if endpoint == "completions":
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


@dataclass
class Traffic:
    """``ends`` counts outcomes, ``errors`` unexpected ones.

    Requests that arrive with ``max_open`` open are counted and not sent: delaying them would let
    the server choose the arrival times.
    """

    url: str
    max_open: int
    ends: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    num_open: int = 0
    num_not_sent: int = 0
    most_late_s: float = 0.0

    async def run(self, num: int, per_s: float, seed: int) -> None:
        """Poisson arrivals; returns when every request has ended."""
        arrivals_s: Times = at_rate(num, per_s, 1.0, np.random.default_rng(seed))
        dice = Random(seed)
        started_s = perf_counter()
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(self.url, connector=connector, timeout=TIMEOUT) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for arrival_s in arrivals_s:
                wait_s = started_s + arrival_s - perf_counter()
                self.most_late_s = max(self.most_late_s, -wait_s)
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                if self.num_open < self.max_open:
                    self.num_open += 1
                    tasks.create_task(self._send(session, Ask.at_random(dice)))
                else:
                    self.num_not_sent += 1

    async def _send(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        try:
            async with asyncio.timeout(ask.stays_s) as stay:
                self.ends[await _answer(session, ask)] += 1
        except TimeoutError:
            if stay.expired():
                self.ends["has left"] += 1
            else:
                self.errors[f"no end after {TIMEOUT.total} s"] += 1
        except NOT_A_REPLY as error:
            self.errors[repr(error)] += 1
        except StreamError as error:
            self.errors[str(error)] += 1
        finally:
            self.num_open -= 1


async def _answer(session: aiohttp.ClientSession, ask: Ask) -> str:
    """The outcome. Raises StreamError if it is not the expected one."""
    async with session.post(PATHS[ask.endpoint], json=ask.body) as response:
        if response.status != ask.status:
            raise StreamError(f"{response.status}: {message_of_body(await response.read())}")
        if response.status != 200:
            await response.read()
            return "refused"
        if "stream" not in ask.body:
            _check_usage(ask, json.loads(await response.read())["usage"]["completion_tokens"])
            return "whole"
        stream = Stream()
        async for data in response.content.iter_any():
            stream.feed(data, perf_counter())
        _check_usage(ask, stream.end().completion_tokens)
        return "streamed"


def _check_usage(ask: Ask, num_tokens: int) -> None:
    if not 1 <= num_tokens <= ask.body["max_tokens"]:
        raise StreamError("usage is not from 1 to max_tokens")
