"""Long texts flood /tokenize and /detokenize, from clients that mostly leave."""

import asyncio
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from benchmarks.harness.checked_load import Load
from benchmarks.harness.fleet import Member, running_fleet
from benchmarks.processes import own_bytes
from tests.mesh.long_model import long_model

MAX_LEN = 1 << 18  # context with room for texts of this length
TEXT_CHARS = (250_000, 450_000)
NUM_BODIES = 4
NUM_CLIENTS = 12
MAX_GROWTH_BYTES = 8 << 20
"""Each process grew by 1.4 MB at most; the texts of 40 leavers are 13 MB."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
"""By default malloc keeps once-filled heaps, up to 15 MB of free memory."""
MAX_OPEN = 4 * NUM_CLIENTS
"""Conversions at once. A client waits for one; a busy gateway notices disconnects a little late: 19
were the most. Uncancelled, every leaver's conversion would wait."""
SENTENCES = ("The shoal turns as one 👋 and no fish gives the order. \n", "def f(x): return x\n")


@dataclass
class Flood:
    """Most of its clients leave before the answer, at any stage."""

    url: str
    asks: list[tuple[str, bytes, bytes]] = field(default_factory=list)  # path, body, answer
    num_answered: int = 0
    num_left: int = 0
    is_over: bool = False

    async def prepare(self, session: aiohttp.ClientSession, dice: random.Random) -> None:
        for number in range(NUM_BODIES):
            text = f"{number} " + "".join(dice.choices(SENTENCES, k=20_000))
            text = text[: dice.randint(*TEXT_CHARS)]
            there = json.dumps({"prompt": text}).encode()
            answer = await self._post(session, "tokenize", there)
            ids = json.dumps({"tokens": json.loads(answer)["tokens"]}).encode()
            detokenized = await self._post(session, "detokenize", ids)
            assert json.loads(detokenized) == {"prompt": text}
            self.asks += [("tokenize", there, answer), ("detokenize", ids, detokenized)]

    async def run(self, session: aiohttp.ClientSession, num_leavers: int) -> None:
        """Runs until this number of further clients has left."""
        goal = self.num_left + num_leavers
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_CLIENTS):
                tasks.create_task(self._client(session, random.Random(number), goal))

    async def _client(self, session: aiohttp.ClientSession, dice: random.Random, goal: int) -> None:
        while self.num_left < goal:
            path, body, answer = dice.choice(self.asks)
            leaves_s = dice.uniform(0, 0.4) if dice.random() < 0.9 else None
            try:
                async with asyncio.timeout(leaves_s):
                    assert await self._post(session, path, body) == answer
                self.num_answered += 1
            except TimeoutError:
                self.num_left += 1

    async def _post(self, session: aiohttp.ClientSession, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        async with session.post(f"{self.url}/{path}", data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.read()


async def watched(flooding: asyncio.Task[None], tokenizer: Member) -> float:
    """The most conversions open at once."""
    most = 0.0
    while not flooding.done():
        most = max(most, (await tokenizer.metrics())["shoal_open_conversions"])
        await asyncio.sleep(0.05)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("num_leavers", [40, 150])
async def test_floods_of_conversions_whose_clients_leave_keep_no_memory_and_hold_up_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_leavers: int
):
    for name, value in MALLOC.items():
        monkeypatch.setenv(name, value)
    model = tmp_path / "model"
    model.mkdir()
    settings = {"MODEL": str(long_model(model, MAX_LEN)), "TEST_PACE": str(tmp_path)}
    async with running_fleet(tmp_path, settings) as fleet:
        for kind in ("scheduler", "tokenizer", "gateway"):
            await fleet.start(kind)
        await fleet.start("worker", module="tests.mesh.paced_worker")
        await fleet.until_ready()
        (gateway,), (tokenizer,) = fleet.of("gateway"), fleet.of("tokenizer")
        flood = Flood(gateway.url)
        load = Load(2, 40, lambda number: gateway.url)
        await load.learn()

        async def held_after(num_leavers: int) -> tuple[int, int]:
            load.is_over = False
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.run())
                flooding = tasks.create_task(flood.run(session, num_leavers))
                assert await watched(flooding, tokenizer) < MAX_OPEN
                load.is_over = True
            await fleet.until_idle()
            assert (await tokenizer.metrics())["shoal_open_conversions"] == 0
            assert (await gateway.metrics())["shoal_buffered_bytes"] == 0
            return own_bytes(gateway.process.pid), own_bytes(tokenizer.process.pid)

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await flood.prepare(session, random.Random(0))
            before = await held_after(num_leavers // 2)
            num_good = load.num_good
            after = await held_after(num_leavers)
        assert load.num_good > num_good
        assert not load.failures, load.failures[:5]
        assert not load.differences
        assert flood.num_answered > 0
        assert after[0] - before[0] < MAX_GROWTH_BYTES
        assert after[1] - before[1] < MAX_GROWTH_BYTES
