"""A worker of two ranks as a user starts it, and streams after the loss of a rank."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from cli.exit_codes import WRONG
from tests.cli.serving import Serving, is_alive, serving
from tests.cli.texts import VOCAB_SIZE, save_with_tokenizer
from tests.services.worker.checkpoints import assert_greedy

FLAGS = ("--tensor-parallel-size", "2", "--dtype", "float32", "--max-model-len", "1024")
NUM_TOKENS = 100
NUM_GREEDY = 90


def rank_of(shoal: Serving, rank: int) -> int | None:
    """The process id of a live rank."""
    wanted = [f"SHOAL_MESH_DIR={shoal.directory}/", f"SHOAL_RANK={rank}\0"]
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_text(errors="replace")
        except OSError:
            continue
        if all(each in environment for each in wanted) and is_alive(int(entry.name)):
            return int(entry.name)
    return None


async def text_of(shoal: Serving, begun: asyncio.Event | None = None) -> str:
    """The output of a fixed prompt."""
    pieces = []
    async with shoal.client() as client:
        stream = await client.completions.create(
            model="shoal-tiny",
            prompt="import os\n",
            max_tokens=NUM_TOKENS,
            temperature=0.7,
            seed=5,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            pieces.append(chunk.choices[0].text)
            if begun is not None and len(pieces) > 2:
                begun.set()
    return "".join(pieces)


async def lose(shoal: Serving, number: signal.Signals, rank: int, text: str) -> None:
    """Sends a rank a signal during the generation of ``text``, which completes in another group."""
    follower = rank_of(shoal, 1)
    victim = follower if rank else worker_of(shoal)
    assert follower is not None
    assert victim is not None
    begun = asyncio.Event()
    running = asyncio.create_task(text_of(shoal, begun))
    await begun.wait()
    os.kill(victim, number)
    assert await running == text
    assert not is_alive(follower), "a group ends as a whole"
    assert rank_of(shoal, 1) not in (None, follower)


def worker_of(shoal: Serving) -> int:
    """The first rank, started by ``shoal serve``."""
    follower = rank_of(shoal, 1)
    stat = Path(f"/proc/{follower}/stat").read_text()
    return int(stat.rsplit(")", 1)[1].split()[1])


async def test_a_stream_outlives_a_rank_that_is_killed(tmp_path: Path) -> None:
    async with serving(tmp_path, *FLAGS) as shoal:
        await shoal.until_ready()
        text = await text_of(shoal)
        await lose(shoal, signal.SIGKILL, 1, text)
        follower = rank_of(shoal, 1)
        assert len(list(tmp_path.glob("*/admin.worker-*.sock"))) == 2, (
            "the lost group's sockets are gone"
        )
    assert follower is not None
    assert not is_alive(follower)
    assert "2 ranks" in "\n".join(shoal.lines)


@pytest.mark.slow
async def test_a_stream_outlives_ranks_that_stand_still_and_the_first_one(tmp_path: Path) -> None:
    async with serving(tmp_path, *FLAGS) as shoal, serving(tmp_path / "alone", *FLAGS[2:]) as alone:
        await shoal.until_ready()
        await alone.until_ready()
        text = await text_of(alone)
        assert await text_of(shoal) == text
        await lose(shoal, signal.SIGSTOP, 1, text)
        await lose(shoal, signal.SIGKILL, 0, text)
        await lose(shoal, signal.SIGSTOP, 0, text)


@pytest.mark.slow
async def test_sixteen_texts_of_whole_experts_outlive_a_rank_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_with_tokenizer(folder, "Qwen3MoeForCausalLM")
    rng = np.random.default_rng(2)
    prompts = [rng.integers(8, VOCAB_SIZE, num).tolist() for num in range(5, 37, 2)]
    flags = ("--model", str(folder), "--served-model-name", "any", "--enable-expert-parallel")
    ranks = ("--tensor-parallel-size", "2", "--dtype", "float32")
    async with (
        serving(tmp_path / "mesh", *flags, *ranks) as shoal,
        AsyncOpenAI(base_url=f"{shoal.url}/v1", api_key="none", timeout=90) as client,
    ):
        await shoal.until_ready()
        follower = rank_of(shoal, 1)
        assert follower is not None
        begun = asyncio.Event()
        running = [asyncio.create_task(ids_of(client, prompt, begun)) for prompt in prompts]
        await begun.wait()
        os.kill(follower, signal.SIGKILL)
        texts = await asyncio.gather(*running)
        assert rank_of(shoal, 1) not in (None, follower)
    oracle = AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt, ids in zip(prompts, texts, strict=True):
        assert len(ids) == NUM_GREEDY
        assert_greedy(oracle, prompt, ids)


async def ids_of(client: AsyncOpenAI, prompt: list[int], begun: asyncio.Event) -> list[int]:
    """The ids of a greedy output; signals its third token."""
    ids: list[int] = []
    stream: Any = await client.completions.create(
        model="any",
        prompt=prompt,
        max_tokens=NUM_GREEDY,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    async for chunk in stream:
        ids += chunk.choices[0].token_ids
        if 2 < len(ids) < NUM_GREEDY // 2:
            begun.set()
    return ids


@pytest.mark.slow
async def test_an_indivisible_model_is_refused_at_the_start(tmp_path: Path) -> None:
    async with serving(tmp_path, "--tensor-parallel-size", "3") as shoal:
        assert await asyncio.wait_for(shoal.process.wait(), 60) == WRONG
    assert "3 ranks" in "\n".join(shoal.lines)
