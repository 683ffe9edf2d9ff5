"""Clients with random requests that sometimes hang up; and the processes' memory meanwhile."""

import asyncio
import json
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.processes import own_bytes

TIMEOUT = aiohttp.ClientTimeout(total=120)
WORDS = (
    "def",
    "shoal",
    "import os\n",
    "class Fish:\n",
    "Grüße 👋",
    "the gateway",
    "return",
    "12 + 30",
)
BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": [9000]},
    {"prompt": "x" * 50_000},
    {"prompt": []},
    {"stop": 7},
)


@dataclass(frozen=True)
class Ask:
    """One request, abandoned by its client after ``hangs_up_s``."""

    path: str
    body: dict[str, Any]
    hangs_up_s: float | None

    @classmethod
    def at_random(cls, dice: random.Random) -> "Ask":
        path = dice.choice(("completions", "chat/completions"))
        hangs_up_s = dice.uniform(0, 0.3) if dice.random() < 0.25 else None
        return cls(path, {**_body(dice), **_prompt(dice, path)}, hangs_up_s)


def _body(dice: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": dice.choice((1, 4, 12, 40)),
        "temperature": dice.choice((0, 0.8)),
        "n": dice.choice((1, 1, 1, 3)),
        "stream": dice.random() < 0.6,
        "ignore_eos": dice.random() < 0.5,
    }
    if dice.random() < 0.3:
        body["stop"] = dice.choice(("e", [" the", "\n"], ["no such words"]))
    if dice.random() < 0.2:
        body |= {"bad_words": ["self"], "repetition_penalty": 1.1, "logit_bias": {"300": 5}}
    return body


def _prompt(dice: random.Random, path: str) -> dict[str, Any]:
    """Many share a beginning, and so some blocks."""
    text = "A shoal. " * dice.choice((0, 4, 12)) + " ".join(
        dice.choices(WORDS, k=dice.randint(1, 25))
    )
    has_logprobs = dice.random() < 0.3
    if path == "completions":
        return {"prompt": text, "logprobs": dice.choice((0, 5, 20)) if has_logprobs else None}
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "logprobs": has_logprobs, "top_logprobs": 5 * has_logprobs}


@dataclass
class Traffic:
    """``num`` clients at ``url``; ``ends`` counts the outcomes of their requests."""

    url: str
    num: int
    ends: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def run(self) -> None:
        """Runs until ``is_over``; each client finishes its request. Raises unexpected errors."""
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(self.num):
                tasks.create_task(self._client(session, random.Random(number)))

    async def _client(self, session: aiohttp.ClientSession, dice: random.Random) -> None:
        while not self.is_over:
            if dice.random() < 0.05:
                await self._ask_wrongly(session, dice.choice(BAD_BODIES))
                continue
            ask = Ask.at_random(dice)
            try:
                async with asyncio.timeout(ask.hangs_up_s):
                    await self._ask(session, ask)
            except TimeoutError:
                assert ask.hangs_up_s is not None, f"no end: {ask}"
                self.ends["hung up"] += 1

    async def _ask(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        url = f"{self.url}/v1/{ask.path}"
        async with session.post(url, json=ask.body, timeout=TIMEOUT) as response:
            text = await response.text()
            assert response.status == 200, f"{response.status}: {text[:500]}"
        objects = events_of(text) if ask.body["stream"] else [json.loads(text)]
        choices = [choice for each in objects for choice in each["choices"]]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert len(reasons) == ask.body["n"], f"{reasons}: {ask}"
        self.ends["streamed" if ask.body["stream"] else "whole"] += 1

    async def _ask_wrongly(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 400, await response.text()
        self.ends["refused"] += 1


def events_of(text: str) -> list[dict[str, Any]]:
    *lines, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), text[-500:]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@dataclass
class Held:
    """Samples of each process's own memory in bytes; ``pids`` by name."""

    pids: dict[str, int]
    samples: dict[str, list[int]] = field(default_factory=dict)

    def sample(self) -> None:
        for name, pid in self.pids.items():
            self.samples.setdefault(name, []).append(own_bytes(pid))

    def growth(self) -> dict[str, float]:
        """From the third quarter of the time to the last, as a share of the memory; one-time growth
        falls into the first half."""
        return {name: _growth(samples) for name, samples in self.samples.items()}


def _growth(samples: list[int]) -> float:
    half = samples[len(samples) // 2 :]
    before, after = half[: len(half) // 2], half[len(half) // 2 :]
    return statistics.median(after) / statistics.median(before) - 1
