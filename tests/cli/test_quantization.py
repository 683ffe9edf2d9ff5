"""Quantised weights, from the HTTP request to native code and back, with MTP drafts."""

import asyncio
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from benchmarks.harness.oracle import load_as_qwen2
from services.worker.weights.online import ONLINE, Quantization
from shared.model_folder import EMBEDDED_MODEL
from tests.cli.serving import serving
from tests.cli.test_transformers_models import NUM_TOKENS, prompts_with_one_beginning, text_of
from tests.services.worker.checkpoints import assert_greedy, quantized


@pytest.mark.parametrize("quantization", ONLINE)
async def test_greedy_texts_are_those_of_what_the_codes_stand_for(
    tmp_path: Path, quantization: Quantization
) -> None:
    """Alone, then eight at once in chunks, with a common beginning that is cached, in a KV cache so
    small that some are preempted."""
    flags = [
        *("--quantization", quantization, "--dtype", "float32", "--served-model-name", "any"),
        *("--max-model-len", "112", "--num-gpu-blocks-override", "12"),
        *("--max-num-batched-tokens", "39", "--max-num-seqs", "8"),
    ]
    prompts = prompts_with_one_beginning()
    async with (
        serving(tmp_path, *flags) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await server.until_ready()
        alone, _ = await text_of(client, prompts[0])
        together = await asyncio.gather(*(text_of(client, prompt) for prompt in prompts))
        values = await server.metrics("scheduler")
    assert max(num_cached for _, num_cached in together) >= 16
    assert sum(value for name, value in values.items() if "num_preemptions_total" in name) > 0
    assert sum(value for name, value in values.items() if "accepted_tokens_total" in name) > 0
    oracle = load_as_qwen2(EMBEDDED_MODEL)
    texts = [alone, *(ids for ids, _ in together)]
    with quantized(oracle, quantization):
        for prompt, ids in zip([prompts[0], *prompts], texts, strict=True):
            assert len(ids) == NUM_TOKENS
            assert_greedy(oracle, prompt, ids)
