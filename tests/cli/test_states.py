"""A model with layers that keep a state, from the HTTP request to native code and back."""

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from shared.model_folder import EMBEDDED_MODEL
from tests.cli.serving import serving
from tests.cli.texts import NUM_TOKENS, VOCAB_SIZE, text_of
from tests.services.worker.checkpoints import assert_greedy
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES, Checkpoint

FLAGS = [
    *("--dtype", "float32", "--served-model-name", "any"),
    *("--max-num-batched-tokens", "90", "--max-num-seqs", "8", "--num-gpu-blocks-override", "14"),
]
INTERVAL = 64  # ids between two copies of a state


def save(folder: Path, family: str) -> None:
    shape = HYBRID_FAMILIES[family]
    Checkpoint(replace(shape, changes=shape.changes | {"vocab_size": VOCAB_SIZE}), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED_MODEL / name, folder / name)


def prompts_with_one_beginning() -> list[list[int]]:
    rng = np.random.default_rng(1)
    beginning = rng.integers(8, VOCAB_SIZE, INTERVAL + 6).tolist()
    return [beginning + rng.integers(8, VOCAB_SIZE, num).tolist() for num in range(10, 34, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "drafts"),
    [
        ("Qwen3.5", "mtp"),
        ("Qwen3-Next", "ngram"),
        ("Qwen3.5 MoE", "none"),
    ],
)
async def test_texts_are_those_of_transformers_whatever_befalls_the_services(
    tmp_path: Path, family: str, drafts: str
) -> None:
    """Alone, from a copy of the state, and eight at once: some are preempted, and the worker and
    the scheduler are killed."""
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder, family)
    oracle = AutoModelForCausalLM.from_pretrained(folder)
    prompts = prompts_with_one_beginning()
    flags = "--model", str(folder), "--speculative-config", f'{{"method": "{drafts}"}}'
    async with (
        serving(tmp_path, *FLAGS, *flags) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await server.until_ready()
        texts = [await text_of(client, prompts[0]) for _ in range(2)]
        turn = [*prompts[0], *texts[0][0]]
        later = await text_of(client, turn[:-1])
        texts += await asyncio.gather(*(text_of(client, prompt) for prompt in prompts))
        values = await server.metrics("scheduler")
        for service in ("worker", "scheduler"):
            others = asyncio.gather(*(text_of(client, prompt) for prompt in prompts))
            await asyncio.sleep(0.1)
            os.kill(server.children()[service], signal.SIGKILL)
            texts += await others
    assert [num_cached for _, num_cached in texts[:2]] == [0, INTERVAL]
    assert later[1] == INTERVAL
    assert values['shoal_states{state="kept"}'] > 0
    assert sum(value for name, value in values.items() if "num_preemptions_total" in name) > 0
    for prompt, (ids, _) in zip([prompts[0]] * 2 + prompts * 3, texts, strict=True):
        assert len(ids) == NUM_TOKENS
        assert_greedy(oracle, prompt, ids)
