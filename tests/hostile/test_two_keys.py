"""A key that uses all it is allowed, next to another one: stored data and order of service.
``benchmarks/two_keys.py`` measures times."""

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from benchmarks.harness.hostile_key import KINDS, HostileKey
from benchmarks.harness.polite_key import PoliteKey
from tests.cli.serving import serving

POLITE, HOSTILE = "key-that-is-polite", "key-that-is-hostile"
NUM_STORED = 10
NUM_LINES = 20
MAX_BATCHES = 20


def flags(tmp_path: Path) -> list[str]:
    return [
        *("--api-key", f"{POLITE},{HOSTILE}", "--batch-dir", str(tmp_path / "batches")),
        *("--response-store", str(tmp_path / "store.db"), "--response-store-bytes", "8388608"),
        *("--max-background-responses", "8", "--max-batches-per-key", str(MAX_BATCHES)),
        *("--max-open-requests-per-key", "8", "--max-open-batch-requests", "6"),
    ]


@pytest.mark.slow
async def test_a_key_loses_nothing_to_one_that_does_its_worst(tmp_path: Path):
    async with serving(tmp_path / "mesh", *flags(tmp_path)) as shoal:
        await shoal.until_ready()
        headers = {"Authorization": f"Bearer {POLITE}"}
        async with aiohttp.ClientSession(shoal.url, headers=headers) as session:
            polite = PoliteKey(session)
            stored = [await polite.store() for _ in range(NUM_STORED)]
            hostile = HostileKey(shoal.url, HOSTILE, num_clients=2)
            attack = asyncio.create_task(hostile.run())
            try:
                await until_all_has_been_tried(hostile, attack)
                queued = await polite.store(background=True)
                batch = await polite.batch_at_end(await polite.start_batch(NUM_LINES))
                for _ in range(20):
                    assert await polite.first_token_s()
                status = await polite.status_at_end(queued)
                has_open_batches = await num_open_batches(shoal.url)
            finally:
                attack.cancel()
                await asyncio.wait([attack])
            assert attack.cancelled()
            assert status in ("completed", "incomplete")
            assert (batch["status"], batch["request_counts"]["completed"]) == (
                "completed",
                NUM_LINES,
            )
            assert has_open_batches > 1, "the batch ran in turn, before the other key's"
            assert await polite.num_lost([*stored, queued]) == 0


async def until_all_has_been_tried(hostile: HostileKey, attack: asyncio.Task[None]) -> None:
    """The store is full, and batches and background responses are at their limits."""
    async with asyncio.timeout(120):
        while not attack.done():
            kinds = Counter(kind for kind, _ in hostile.answers.elements())
            has_refusals = all(hostile.answers[kind, 429] for kind in ("batches", "background"))
            if has_refusals and kinds["stored responses"] > 20 and len(kinds) == len(KINDS):
                return
            await asyncio.sleep(0.2)
    attack.result()


async def num_open_batches(url: str) -> int:
    headers = {"Authorization": f"Bearer {HOSTILE}"}
    async with (
        aiohttp.ClientSession(url, headers=headers) as session,
        session.get("/v1/batches?limit=100") as response,
    ):
        found = (await response.json())["data"]
    return sum(1 for batch in found if batch["status"] in ("validating", "in_progress"))
