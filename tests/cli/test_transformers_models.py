"""transformers' architectures, from the HTTP request to the layers and back: by transformers' code,
and by Shoal's own."""

import asyncio
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from services.worker.models.registry import MODELS
from tests.cli.serving import Serving, serving
from tests.cli.texts import NUM_TOKENS, prompts_with_one_beginning, save_with_tokenizer, text_of
from tests.services.worker.checkpoints import assert_greedy
from tests.services.worker.foreign_checkpoints import FAMILIES, OWN_FAMILIES
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_quantized_models import with_values

ALWAYS = ("GptOssForCausalLM",)  # experts, windows and sinks
ALWAYS_OURS = ("Lfm2ForCausalLM",)
UNEQUAL = ("MiMoV2FlashForCausalLM",)  # one group of layers, as their entries differ
COUNTED = "--enable-expert-distribution-metrics"


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in FAMILIES],
)
async def test_greedy_texts_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model_impl = "transformers" if family in MODELS else "auto"
    await compare(tmp_path, family, 4, model_impl, "transformers computes this model")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("Glm4MoeForCausalLM", "fp8"),
        pytest.param("Cohere2ForCausalLM", "gptq, desc_act", marks=pytest.mark.slow),
    ],
)
async def test_greedy_texts_of_codes_are_those_of_their_values(
    tmp_path: Path, family: str, layout: str
) -> None:
    await compare(
        tmp_path, family, 4, "transformers", "the weights are quantised already", layout=layout
    )


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ALWAYS_OURS else pytest.mark.slow)
        for name in OWN_FAMILIES
    ],
)
async def test_greedy_texts_of_our_own_code_are_those_of_transformers(
    tmp_path: Path, family: str
) -> None:
    """MiMo, unknown to transformers, is tested as the embedded model."""
    has_experts = any("experts" in name for name in OWN_FAMILIES[family])
    flags = (COUNTED,) if has_experts else ()
    await compare(tmp_path, family, 16, "shoal", "kernels: native code", *flags)


async def compare(
    tmp_path: Path,
    family: str,
    block_size: int,
    model_impl: str,
    line: str,
    *more: str,
    layout: str | None = None,
) -> None:
    """Alone, then eight at once in chunks of 7 tokens, with a common cached beginning, in a KV
    cache so small that some are preempted, and with drafts. ``line`` is expected in the log,
    ``more`` are flags. Weights are in codes of ``layout``, if it is given."""
    folder = values = tmp_path / "model"
    save_with_tokenizer(folder, family)
    if layout is not None:
        folder, values = tmp_path / "codes", tmp_path / "values"
        tensors = save_quantized(tmp_path / "model", folder, LAYOUTS[layout])
        with_values(tmp_path / "model", tensors, values)
    has_groups = "layer_types" in (FAMILIES | OWN_FAMILIES)[family] and family not in UNEQUAL
    num_tokens = 384 if has_groups else 192  # in blocks of half of the layers, or of all
    flags = [
        *("--model", str(folder), "--served-model-name", "any", "--dtype", "float32"),
        *("--max-model-len", "112", "--block-size", str(block_size)),
        *("--num-gpu-blocks-override", str(num_tokens // block_size)),
        *("--max-num-batched-tokens", "15", "--max-num-seqs", "8"),
        *("--model-impl", model_impl),
        *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
        *more,
    ]
    prompts = prompts_with_one_beginning()
    async with (
        serving(tmp_path / "mesh", *flags) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await server.until_ready()
        alone, _ = await text_of(client, prompts[0])
        together = await asyncio.gather(*(text_of(client, prompt) for prompt in prompts))
        await check_what_happened(server, [num_cached for _, num_cached in together], line)
        await check_loads(server, COUNTED in more)
    oracle = AutoModelForCausalLM.from_pretrained(values).eval()
    texts = [alone, *(ids for ids, _ in together)]
    for prompt, ids in zip([prompts[0], *prompts], texts, strict=True):
        assert len(ids) == NUM_TOKENS
        assert_greedy(oracle, prompt, ids)


async def check_what_happened(server: Serving, num_cached: list[int], line: str) -> None:
    """Checks that outputs took the intended paths."""
    assert max(num_cached) >= 20
    values = await server.metrics("scheduler")
    preemptions = [value for name, value in values.items() if "num_preemptions_total" in name]
    assert sum(preemptions) > 0
    assert any(line in each for each in server.lines)


async def check_loads(server: Serving, are_counted: bool) -> None:
    """Every expert's load was observed, if tokens were counted."""
    values = await server.metrics("worker")
    nums = [value for name, value in values.items() if name.startswith("shoal_expert_load_count{")]
    assert bool(nums) == are_counted
    assert all(num > 0 for num in nums)
    sums = [value for name, value in values.items() if name.startswith("shoal_expert_load_sum{")]
    assert sums == pytest.approx(nums), "the mean load is 1"
