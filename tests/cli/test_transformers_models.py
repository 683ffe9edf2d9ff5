"""transformers' architectures, from the HTTP request to the layers and back: by transformers' code,
and by Shoal's own."""

import asyncio
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.harness.fleet import Fleet
from services.worker.models.registry import MODELS
from tests.cli.texts import NUM_TOKENS, prompts_with_one_beginning, save_with_tokenizer, text_of
from tests.mesh.forks import one_of_each
from tests.mesh.structured import client_of
from tests.services.worker.checkpoints import assert_greedy
from tests.services.worker.foreign_checkpoints import FAMILIES, OWN_FAMILIES
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_quantized_models import with_values

# Entries with a window are twice as large: one group of layers without it, two with it.
UNEQUAL = ("Gemma4ForCausalLM", "MiMoV2FlashForCausalLM")
NATIVE = "kernels: native code"
COUNTED = "ENABLE_EXPERT_DISTRIBUTION_METRICS"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_texts_match_transformers(tmp_path: Path, family: str) -> None:
    model_impl = "transformers" if family in MODELS else "auto"
    await compare(tmp_path, family, 4, model_impl, "transformers computes this model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [("Glm4MoeForCausalLM", "fp8"), ("Cohere2ForCausalLM", "gptq, desc_act")],
)
async def test_greedy_texts_of_codes_match_their_values(
    tmp_path: Path, family: str, layout: str
) -> None:
    await compare(
        tmp_path, family, 4, "transformers", "the weights are quantised already", layout=layout
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN_FAMILIES)
async def test_greedy_texts_of_our_own_code_match_transformers(tmp_path: Path, family: str) -> None:
    """MiMo, unknown to transformers, is tested as the embedded model."""
    has_experts = any("experts" in name for name in OWN_FAMILIES[family])
    await compare(tmp_path, family, 16, "shoal", NATIVE, counts=has_experts)


async def compare(
    tmp_path: Path,
    family: str,
    block_size: int,
    model_impl: str,
    line: str,
    counts: bool = False,
    layout: str | None = None,
) -> None:
    """Alone, then eight at once in chunks of 7 tokens, with a common cached beginning, in a KV
    cache so small that some are preempted, and with drafts. ``line`` is expected in a log; the
    worker ``counts`` the tokens of experts. Weights are in codes of ``layout``, if it is given."""
    folder = values = tmp_path / "model"
    save_with_tokenizer(folder, family)
    if layout is not None:
        folder, values = tmp_path / "codes", tmp_path / "values"
        tensors = save_quantized(tmp_path / "model", folder, LAYOUTS[layout])
        with_values(tmp_path / "model", tensors, values)
    has_groups = "layer_types" in (FAMILIES | OWN_FAMILIES)[family]
    num_groups = 3 if family in UNEQUAL else 2 if has_groups else 1
    num_tokens = 192 * num_groups  # in blocks of the layers of a group
    settings = {
        "MODEL": str(folder), "SERVED_MODEL_NAME": "any", "DTYPE": "float32",
        "MAX_MODEL_LEN": "112", "BLOCK_SIZE": str(block_size),
        "NUM_GPU_BLOCKS_OVERRIDE": str(num_tokens // block_size),
        "MAX_NUM_BATCHED_TOKENS": "15", "MAX_NUM_SEQS": "8", "MODEL_IMPL": model_impl,
        "SPECULATIVE_CONFIG": '{"method": "ngram", "num_speculative_tokens": 2}',
        COUNTED: str(counts).lower(),
    }  # fmt: skip
    prompts = prompts_with_one_beginning()
    async with (
        one_of_each(tmp_path / "mesh", **settings) as fleet,
        client_of(fleet.of("gateway")[0].url) as client,
    ):
        alone, _ = await text_of(client, prompts[0])
        together = await asyncio.gather(*(text_of(client, prompt) for prompt in prompts))
        await check_what_happened(fleet, [num_cached for _, num_cached in together])
        await check_loads(fleet, counts)
    assert any(line in log.read_text() for log in (tmp_path / "mesh").glob("*.log"))
    oracle = AutoModelForCausalLM.from_pretrained(values).eval()
    texts = [alone, *(ids for ids, _ in together)]
    for prompt, ids in zip([prompts[0], *prompts], texts, strict=True):
        assert len(ids) == NUM_TOKENS
        assert_greedy(oracle, prompt, ids)


async def check_what_happened(fleet: Fleet, num_cached: list[int]) -> None:
    """Checks that outputs took the intended paths."""
    assert max(num_cached) >= 20
    values = await fleet.of("scheduler")[0].metrics()
    preemptions = [value for name, value in values.items() if "num_preemptions_total" in name]
    assert sum(preemptions) > 0


async def check_loads(fleet: Fleet, are_counted: bool) -> None:
    """Every expert's load was observed, if tokens were counted."""
    values = await fleet.of("worker")[0].metrics()
    nums = [value for name, value in values.items() if name.startswith("shoal_expert_load_count{")]
    assert bool(nums) == are_counted
    assert all(num > 0 for num in nums)
    sums = [value for name, value in values.items() if name.startswith("shoal_expert_load_sum{")]
    assert sums == pytest.approx(nums), "the mean load is 1"
