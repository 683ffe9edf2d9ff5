"""Models with latent attention: their caches, backends and outputs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM, PreTrainedModel

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, KERNELS, make_engine
from services.worker.backends.native import NativeLM
from services.worker.layers.heads import LatentExpansion, LatentSpec
from services.worker.models.registry import find_model, read_model_config
from services.worker.weights.load import build_model, load_model
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import assert_greedy, oracle_of, random_prompts, save_model
from tests.services.worker.driver import model_of
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_families import CASES, DENSE
from tests.services.worker.test_native import make_config, make_model
from tests.services.worker.test_options import BACKENDS, REFUSED

CPU, META = torch.device("cpu"), torch.device("meta")
CASE = "deepseek v3, yarn"
BEGINNING, *ENDS = random_prompts(9, seed=4)
PROMPTS = [[*(BEGINNING * 40)[:40], *end] for end in ENDS]
GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=24, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class WiderLatentSpec(LatentSpec):
    unheard_of: float = 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    save_model(folder, DeepseekV3ForCausalLM, **CASES[CASE][1])
    return folder


def test_a_token_of_deepseek_v3_takes_so_many_bytes() -> None:
    """576 elements in each of 61 layers; or 512 codes with four scales, and a key in numbers."""
    make: Any = find_model(["DeepseekV3ForCausalLM"]).Config
    config = make(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        first_k_dense_replace=61,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
    )
    model = build_model(config, torch.bfloat16, META)
    layouts = model.kv_layouts(torch.bfloat16, drafts=False)
    assert {layout.entry for layout in layouts} == {(1, 1, 576)}
    assert sum(layout.num_bytes for layout in layouts) == 70_272
    layouts = model.kv_layouts(torch.bfloat16, drafts=False, codes=torch.uint8)
    assert {layout.num_bytes for layout in layouts} == {512 + 4 * 4 + 64 * 2}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_option_of_latents_that_nobody_taught_a_backend_is_refused_by_name(backend: str) -> None:
    model: Any = make_model(make_config("DeepSeek-V3, latents, yarn"), torch.float32)
    attention = model.model.layers[1].self_attn
    known = asdict(attention.latents.spec)
    attention.latents = attention.latents._replace(spec=WiderLatentSpec(**known))
    BACKENDS[backend](model)
    model = make_model(make_config("DeepSeek-V3, latents, yarn"), torch.float32)
    attention = model.model.layers[1].self_attn
    spec = WiderLatentSpec(**known, unheard_of=0.5)
    attention.latents = attention.latents._replace(spec=spec)
    with pytest.raises(REFUSED, match=r"layers\.1\.self_attn: attention's options unheard_of"):
        BACKENDS[backend](model)


def with_values(folder: Path, values: dict[str, torch.Tensor]) -> PreTrainedModel:
    oracle: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, parameter in oracle.named_parameters():
        parameter.data = values[name].float()
    return oracle


@pytest.mark.parametrize("layout", ["gptq", "fp8"])
def test_projections_to_keys_and_values_are_dense_in_quantized_checkpoints(
    tmp_path: Path, layout: str
) -> None:
    dense, quantised = tmp_path / "dense", tmp_path / "quantised"
    save_model(dense, DeepseekV3ForCausalLM, **DENSE)
    values = save_quantized(dense, quantised, LAYOUTS[layout])
    config = read_model_config(quantised)
    model = load_model(quantised, config, torch.float32, CPU, lambda *_: None)
    expansions = {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, LatentExpansion)
    }
    assert len(expansions) == 3
    for name, weight in expansions.items():
        assert torch.equal(weight, values[f"{name}.weight"].float())
    oracle = with_values(dense, values)
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=12)
    prompts = random_prompts(4)
    texts = scheduled.run(make_engine(quantised, "native"), prompts, params).texts
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("kernels", [*KERNELS, pytest.param("device", marks=pytest.mark.slow)])
def test_texts_with_cached_beginnings_preemption_and_drafts_match_transformers(
    folder: Path, kernels: str
) -> None:
    texts = texts_in_few_blocks(folder, kernels)
    oracle = oracle_of(folder)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert len(text) == 24
        assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        ("native", "fp8"),
        pytest.param("torch", "int8", marks=pytest.mark.slow),
        pytest.param("native", "int8", marks=pytest.mark.slow),
        pytest.param("device", "fp8", marks=pytest.mark.slow),
    ],
)
def test_texts_of_codes_match_each_prompt_alone(folder: Path, kernels: str, name: str) -> None:
    engine = make_engine(folder, kernels, kv_cache_dtype=name)
    alone = [scheduled.run(engine, [prompt], GREEDY).texts[0] for prompt in PROMPTS]
    assert texts_in_few_blocks(folder, kernels, kv_cache_dtype=name) == alone


def texts_in_few_blocks(folder: Path, kernels: str, **settings: Any) -> list[list[int]]:
    """Of prompts with a common beginning, in chunks, in blocks for a few of them, with drafts."""
    block_size = ENGINES[kernels]["block_size"]
    engine = make_engine(
        folder,
        kernels,
        num_gpu_blocks_override=192 // block_size,
        max_num_batched_tokens=31,
        max_model_len=112,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "adaptive": False},
        **settings,
    )
    assert isinstance(model_of(engine), NativeLM) == (kernels == "native")
    found = scheduled.run(engine, PROMPTS, GREEDY, caches_prefixes=True)
    assert found.num_hits > 0
    assert found.num_readmitted > 0
    assert any(drafts for rows in found.verified for drafts, _ in rows)
    return found.texts
