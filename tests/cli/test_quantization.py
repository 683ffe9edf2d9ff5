"""Quantized weights, from the HTTP request to native code and back, with drafts."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from transformers import PreTrainedModel

from benchmarks.harness.oracle import load_as_qwen2
from services.worker.weights.online import Quantization
from shared.model_folder import EMBEDDED_MODEL
from tests.cli.serving import serving
from tests.cli.texts import (
    NUM_TOKENS,
    prompts_with_one_beginning,
    save_with_tokenizer,
    text_of,
)
from tests.services.worker.checkpoints import assert_greedy, quantized
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_quantized_models import with_values

FLAGS = [
    *("--dtype", "float32", "--served-model-name", "any"),
    *("--max-model-len", "112", "--num-gpu-blocks-override", "9"),
    *("--max-num-batched-tokens", "39", "--max-num-seqs", "8"),
]


async def assert_texts_of(
    oracle: PreTrainedModel, directory: Path, *flags: str, accepts: bool = True
) -> None:
    """The outputs of one prompt alone, then of eight at once in chunks, with a common cached
    beginning, in a KV cache so small that some are preempted, by a worker that is killed meanwhile.
    With ``accepts`` some drafts are accepted."""
    prompts = prompts_with_one_beginning()
    async with (
        serving(directory, *FLAGS, *flags) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await server.until_ready()
        alone, _ = await text_of(client, prompts[0])
        together = await asyncio.gather(*(text_of(client, prompt) for prompt in prompts))
        values = await server.metrics("scheduler")
        others = asyncio.gather(*(text_of(client, prompt) for prompt in prompts))
        await asyncio.sleep(0.05)
        os.kill(server.children()["worker"], signal.SIGKILL)
        again = await others
    assert max(num_cached for _, num_cached in together) >= 16
    assert sum(value for name, value in values.items() if "num_preemptions_total" in name) > 0
    accepted = sum(value for name, value in values.items() if "accepted_tokens_total" in name)
    assert accepted > 0 or not accepts
    texts = [alone, *(ids for ids, _ in (*together, *again))]
    for prompt, ids in zip([prompts[0], *prompts, *prompts], texts, strict=True):
        assert len(ids) == NUM_TOKENS
        assert_greedy(oracle, prompt, ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "head"),
    [
        ("wint4", "wint8"),
        ("wint8", "none"),
        ("fp8_block", "none"),
    ],
)
async def test_greedy_texts_are_those_of_what_the_codes_stand_for(
    tmp_path: Path, quantization: Quantization, head: Quantization
) -> None:
    oracle = load_as_qwen2(EMBEDDED_MODEL)
    flags = "--quantization", quantization, "--lm-head-quantization", head
    with quantized(oracle, quantization, head):
        await assert_texts_of(oracle, tmp_path, *flags)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gptq, desc_act", "awq", "bitsandbytes"])
async def test_a_model_that_is_quantised_already_needs_no_setting(
    tmp_path: Path, layout: str
) -> None:
    """A MiMo with drafts of its MTP head, which is quantized too."""
    values = save_quantized(EMBEDDED_MODEL, tmp_path / "model", LAYOUTS[layout])
    oracle = load_as_qwen2(EMBEDDED_MODEL)
    for name, parameter in oracle.named_parameters():
        parameter.data = values[name].float()
    await assert_texts_of(oracle, tmp_path / "mesh", "--model", str(tmp_path / "model"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("LlamaForCausalLM", "compressed-tensors"),
        ("Qwen3ForCausalLM", "fp8"),
        ("Qwen3MoeForCausalLM", "gptq"),
        ("Ernie4_5ForCausalLM", "gptq, desc_act"),
        ("Ernie4_5_MoeForCausalLM", "awq"),
    ],
)
async def test_texts_of_other_families_are_those_of_transformers_with_what_the_codes_stand_for(
    tmp_path: Path, family: str, layout: str
) -> None:
    """A random model seldom repeats itself, so no draft need be right."""
    save_with_tokenizer(tmp_path / "dense", family)
    values = save_quantized(tmp_path / "dense", tmp_path / "model", LAYOUTS[layout])
    oracle = with_values(tmp_path / "dense", values, tmp_path / "values")
    speculation = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'
    flags = "--model", str(tmp_path / "model"), "--speculative-config", speculation
    await assert_texts_of(oracle, tmp_path / "mesh", *flags, accepts=False)
