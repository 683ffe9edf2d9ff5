"""A quantized KV cache and quantized weights, from the HTTP request to native code and back, with
MTP drafts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams
from tests.cli.serving import serving
from tests.cli.texts import NUM_TOKENS, prompts_with_one_beginning, text_of
from tests.mesh.forks import one_of_each
from tests.mesh.structured import client_of
from tests.services.worker.stored_codes import save_made_for_codes


@pytest.mark.parametrize(
    ("name", "weights"),
    [("int8", "wint4"), pytest.param("fp8_per_token_head", "none", marks=pytest.mark.slow)],
)
async def test_greedy_texts_are_those_of_one_engine_alone(
    tmp_path: Path, name: str, weights: str
) -> None:
    """Alone, then eight at once in chunks, with a common cached beginning, in a KV cache so small
    that some are preempted."""
    settings = {"KV_CACHE_DTYPE": name, "QUANTIZATION": weights, "DTYPE": "float32"}
    settings |= {"MAX_MODEL_LEN": "112", "NUM_GPU_BLOCKS_OVERRIDE": "9"}
    settings |= {"MAX_NUM_BATCHED_TOKENS": "39", "MAX_NUM_SEQS": "8", "SERVED_MODEL_NAME": "any"}
    prompts = prompts_with_one_beginning()
    async with (
        one_of_each(tmp_path, **settings) as fleet,
        client_of(fleet.of("gateway")[0].url) as client,
    ):
        alone, _ = await text_of(client, prompts[0])
        together = await asyncio.gather(*(text_of(client, prompt) for prompt in prompts))
        values = await fleet.of("scheduler")[0].metrics()
    assert max(num_cached for _, num_cached in together) >= 16
    assert sum(value for name, value in values.items() if "num_preemptions_total" in name) > 0
    assert sum(value for name, value in values.items() if "accepted_tokens_total" in name) > 0
    texts = [alone, *(ids for ids, _ in together)]
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    plain: dict[str, Any] = {"speculative_config": {"method": "none"}, "quantization": weights}
    for other in (name, "auto"):
        engine = make_engine(EMBEDDED_MODEL, "native", kv_cache_dtype=other, **plain)
        expected = scheduled.run(engine, [prompts[0], *prompts], params).texts
        assert (texts == expected) == (other == name)


@pytest.mark.slow
async def test_a_checkpoint_that_was_made_for_codes_has_them_without_a_setting(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    save_made_for_codes(EMBEDDED_MODEL, folder)
    prompts = prompts_with_one_beginning()
    flags = "--model", str(folder), "--dtype", "float32", "--served-model-name", "any"
    async with (
        serving(tmp_path / "mesh", *flags) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await server.until_ready()
        texts = [ids for ids, _ in await asyncio.gather(*(text_of(client, p) for p in prompts))]
        line = "kv-cache-dtype: fp8, as the checkpoint's kv_cache_scheme has it"
        assert any(line in each for each in server.lines)
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    none = {"speculative_config": {"method": "none"}}
    for name in ("fp8", "none"):
        engine = make_engine(folder, "native", kv_cache_dtype=name, **none)
        expected = scheduled.run(engine, prompts, params).texts
        assert (texts == expected) == (name == "fp8")
