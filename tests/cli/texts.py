"""Greedy outputs of small models over HTTP."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams
from tests.mesh.forks import one_of_each
from tests.mesh.structured import client_of
from tests.services.worker.foreign_checkpoints import save_family

VOCAB_SIZE = 8192  # of its tokenizer
NUM_TOKENS = 24


def save_with_tokenizer(folder: Path, family: str) -> None:
    save_family(folder, family, vocab_size=VOCAB_SIZE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED_MODEL / name, folder / name)


def prompts_with_one_beginning() -> list[list[int]]:
    """Eight, so long that not all fit in the KV cache at once."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(8, VOCAB_SIZE, 20).tolist()
    return [beginning + rng.integers(8, VOCAB_SIZE, num).tolist() for num in range(20, 60, 5)]


async def text_of(
    client: AsyncOpenAI, prompt: list[int], model: str = "any"
) -> tuple[list[int], int]:
    """The ids of a greedy text, and how many of the prompt's were cached."""
    done: Any = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert done.usage
    assert done.usage.prompt_tokens_details
    return done.choices[0].token_ids, done.usage.prompt_tokens_details.cached_tokens or 0


async def check_drafts(directory: Path, model: Path, settings: dict[str, str]) -> None:
    """Texts over HTTP are those of an engine without drafts, and some drafts are right."""
    prompts = prompts_with_one_beginning()
    async with (
        one_of_each(directory, MODEL=str(model), **settings) as fleet,
        client_of(fleet.of("gateway")[0].url) as client,
    ):
        found = await _drafted_answers(client, prompts)
    params = [
        SamplingParams(number, temperature=2.0 * (number % 2), max_tokens=24, ignore_eos=True)
        for number in range(len(prompts))
    ]
    plain = make_engine(model, "native", speculative_config={"method": "none"})
    expected = scheduled.run(plain, prompts, params).texts
    assert [each["choices"][0]["token_ids"] for each in found] == expected
    details = [each["usage"]["completion_tokens_details"] for each in found]
    assert sum(each["accepted_prediction_tokens"] for each in details) > 0


async def _drafted_answers(client: AsyncOpenAI, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """All at once, half of them greedy."""
    asked = (
        client.completions.create(
            model="any",
            prompt=prompt,
            max_tokens=24,
            temperature=2 * (number % 2),
            seed=number,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        for number, prompt in enumerate(prompts)
    )
    return [each.model_dump() for each in await asyncio.gather(*asked)]
