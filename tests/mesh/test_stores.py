"""Stores of KV blocks, seen by clients: whole servers, whose workers are killed."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from benchmarks.processes import workers_of
from shared.model_folder import EMBEDDED_MODEL
from tests.cli.serving import Serving, serving
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.hybrids import save_hybrid

pytestmark = pytest.mark.timeout(600)

NUM_CHATS, NUM_TURNS, TURN_LEN, REPLY_LEN = 4, 3, 80, 24
FLAGS = (
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "72", "--max-num-seqs", "4"),
    *("--speculative-config", '{"method": "none"}', "--dtype", "float32"),
)
SIZES: dict[str, Any] = {"vocab_size": 8192, "max_position_embeddings": 1024}
FOUND = "shoal_kv_store_hit_tokens_total"
RECOVERED = "shoal_kv_store_recovered_tokens_total"


@asynccontextmanager
async def server(directory: Path, *flags: str) -> AsyncIterator[Serving]:
    async with serving(directory / "mesh", *FLAGS, *flags) as served:
        await served.until_ready()
        yield served


def with_store(directory: Path) -> tuple[str, ...]:
    return "--kv-offloading-size", "0.25", "--kv-offloading-dir", str(directory / "kv")


def ids_of(seed: int, num: int) -> list[int]:
    return np.random.default_rng(seed).integers(300, 8000, num).tolist()


async def complete(
    client: AsyncOpenAI, prompt: list[int], num: int, **options: Any
) -> tuple[list[int], int]:
    """The ids of the answer, and the number of cached tokens."""
    reply: Any = await client.completions.create(
        model="shoal-tiny", prompt=prompt, max_tokens=num, temperature=0, seed=1,
        extra_body={"ignore_eos": True, "return_token_ids": True, **options},
    )  # fmt: skip
    cached = reply.usage.prompt_tokens_details.cached_tokens
    return reply.choices[0].token_ids, cached


async def play(served: Serving) -> tuple[list[list[int]], int]:
    """All chats in turns, one after another, so that each is evicted before it goes on. Returns
    their ids and the tokens cached in later turns."""
    chats, num_cached = [list[int]() for _ in range(NUM_CHATS)], 0
    async with served.client() as client:
        for turn in range(NUM_TURNS):
            for number, chat in enumerate(chats):
                chat += ids_of(100 * turn + number, TURN_LEN)
                ids, cached = await complete(client, chat, REPLY_LEN)
                chat += ids
                num_cached += cached
            # A longer prompt takes nearly all blocks.
            await complete(client, ids_of(1000 + turn, 900), 2)
    return chats, num_cached


@pytest.mark.slow
async def test_turns_go_on_from_the_store_with_equal_texts(tmp_path: Path) -> None:
    async with server(tmp_path / "without") as plain:
        wanted, few = await play(plain)
    async with server(tmp_path / "with", *with_store(tmp_path)) as served:
        found, many = await play(served)
        metrics = await served.metrics("scheduler")
    assert found == wanted
    later = NUM_CHATS * sum(turn * (TURN_LEN + REPLY_LEN) for turn in range(1, NUM_TURNS))
    assert many > 0.8 * later > few
    assert metrics[FOUND] > 0


@pytest.mark.slow
async def test_turns_go_on_from_a_disk_below_a_small_memory(tmp_path: Path) -> None:
    """The store in memory has the last blocks alone."""
    memory = tmp_path / "kv"
    small = ("--kv-offloading-size", "0.003", "--kv-offloading-dir", str(memory))
    disk = ("--kv-disk-size", "0.25", "--kv-disk-dir", str(tmp_path / "disk"))
    async with server(tmp_path / "without", *small) as plain:
        wanted, few = await play(plain)
    shutil.rmtree(memory)
    async with server(tmp_path / "with", *small, *disk) as served:
        found, many = await play(served)
        metrics = await served.metrics("worker")
    assert found == wanted
    assert many > few
    assert metrics['shoal_kv_store_bytes_total{direction="spill"}'] > 0
    assert metrics['shoal_kv_store_bytes_total{direction="fetch"}'] > 0


@pytest.mark.slow
async def test_a_restarted_server_has_the_store_of_the_last_one(tmp_path: Path) -> None:
    prompt = ids_of(7, 320)
    async with server(tmp_path, *with_store(tmp_path)) as served, served.client() as client:
        wanted, cached = await complete(client, prompt, 16)
        assert cached == 0
        await until_saved(served, 19)
    async with server(tmp_path, *with_store(tmp_path)) as served, served.client() as client:
        found, cached = await complete(client, prompt, 16)
    assert found == wanted
    assert cached >= 288


async def until_saved(served: Serving, num_blocks: int) -> None:
    async with asyncio.timeout(30):
        while True:
            metrics = await served.metrics("scheduler")
            if metrics.get('shoal_kv_store_places{medium="memory",state="full"}', 0) >= num_blocks:
                return
            await asyncio.sleep(0.2)


async def stream(client: AsyncOpenAI, prompt: list[int], num: int, ids: list[int]) -> None:
    """Adds to ``ids`` as they come."""
    chunks = await client.completions.create(
        model="shoal-tiny", prompt=prompt, max_tokens=num, temperature=0, seed=1, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    async for chunk in chunks:
        for choice in chunk.choices:
            ids += getattr(choice, "token_ids", None) or []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "has_windows", "more"),
    [(1, True, ()), (1, False, ()), (2, False, ()), (1, False, ("--tensor-parallel-size", "2"))],
)
async def test_streams_of_a_killed_worker_go_on_from_the_saved_bytes(
    tmp_path: Path, num_workers: int, has_windows: bool, more: tuple[str, ...]
) -> None:
    """With the texts of undisturbed streams."""
    prompts = [ids_of(number, 160) for number in range(3 * num_workers)]  # each worker has some
    num = 500 if has_windows else 200 // num_workers  # the blocks suffice
    flags = (*with_store(tmp_path), "--workers", str(num_workers), *more)
    if has_windows:
        flags += of_windows(tmp_path / "model")
    async with server(tmp_path, *flags) as served, served.client() as client:
        wanted = [(await complete(client, prompt, num))[0] for prompt in prompts]
    async with server(tmp_path / "second", *with_store(tmp_path / "second"), *flags[4:]) as served:
        async with served.client() as client:
            found = [list[int]() for _ in prompts]
            tasks = [
                asyncio.create_task(stream(client, prompt, num, ids))
                for prompt, ids in zip(prompts, found, strict=True)
            ]
            async with asyncio.timeout(60):
                while min(map(len, found)) < 20:
                    await asyncio.sleep(0.01)
            os.kill(workers_of(served.directory)[0], signal.SIGKILL)
            await asyncio.gather(*tasks)
        metrics = await served.metrics("scheduler")
    assert found == wanted
    assert metrics[RECOVERED] >= 160
    assert (metrics["shoal_keep_points"] > 0) == has_windows


def of_windows(model: Path) -> tuple[str, ...]:
    save_family(model, "Gemma3ForCausalLM", **SIZES, sliding_window=40)
    add_tokenizer(model)
    served = "--model", str(model), "--served-model-name", "shoal-tiny"
    return *served, "--num-gpu-blocks-override", "300"


def add_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, folder)


async def test_a_hybrid_goes_on_from_the_saved_state_of_its_killed_worker(tmp_path: Path) -> None:
    """With the text that is computed under another salt, without the cache; so does a later
    turn."""
    model = tmp_path / "model"
    save_hybrid(model, "qwen3.5", **SIZES)
    add_tokenizer(model)
    flags = ("--model", str(model), "--served-model-name", "shoal-tiny", *with_store(tmp_path))
    prompt, found = ids_of(5, 200), list[int]()
    async with server(tmp_path, *flags) as served, served.client() as client:
        wanted, cached = await complete(client, prompt, 700, cache_salt="other")
        assert cached == 0
        task = asyncio.create_task(stream(client, prompt, 700, found))
        async with asyncio.timeout(60):
            while len(found) < 20:
                await asyncio.sleep(0.01)
        os.kill(workers_of(served.directory)[0], signal.SIGKILL)
        await task
        metrics = await served.metrics("scheduler")
        _, cached = await complete(client, [*prompt, *wanted, *ids_of(6, 20)], 4)
    assert found == wanted
    assert metrics[RECOVERED] >= 192
    assert cached >= 256
