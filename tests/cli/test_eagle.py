"""Drafts by an EAGLE-3 head over HTTP: a random model and a random head in folders of their own."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from transformers import LlamaForCausalLM

from shared.model_folder import EMBEDDED_MODEL
from tests.cli.serving import serving
from tests.cli.texts import VOCAB_SIZE, prompts_with_one_beginning
from tests.services.worker.checkpoints import save_model
from tests.services.worker.eagle.checkpoints import save_head

FLAGS = ("--dtype", "float32", "--served-model-name", "any", "--max-num-batched-tokens", "39")


async def test_texts_over_http_are_the_same_with_drafts_and_without(tmp_path: Path) -> None:
    """Greedy, and at a temperature at which drafts of a random head are often right."""
    model, head = tmp_path / "model", tmp_path / "head"
    save_model(
        model,
        LlamaForCausalLM,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=128,
        initializer_range=0.02,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, model / name)
    save_head(head, layout="speculators", vocab_size=VOCAB_SIZE, draft_vocab_size=6000)
    drafting = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    found = []
    for number, speculation in enumerate((drafting | {"adaptive": False}, {"method": "none"})):
        flags = "--model", str(model), "--speculative-config", json.dumps(speculation)
        found.append(await answers(tmp_path / str(number), *flags))
    with_drafts, without = found
    assert [each["choices"] for each in with_drafts] == [each["choices"] for each in without]
    details = [each["usage"]["completion_tokens_details"] for each in with_drafts]
    assert sum(each["accepted_prediction_tokens"] for each in details) > 0


async def answers(directory: Path, *flags: str) -> list[dict[str, Any]]:
    """Eight at once, half of them greedy."""
    async with (
        serving(directory, *FLAGS, *flags) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await server.until_ready()
        asked = (
            client.completions.create(
                model="any",
                prompt=prompt,
                max_tokens=24,
                temperature=2 * (number % 2),
                seed=number,
                extra_body={"return_token_ids": True},
            )
            for number, prompt in enumerate(prompts_with_one_beginning())
        )
        return [each.model_dump() for each in await asyncio.gather(*asked)]
