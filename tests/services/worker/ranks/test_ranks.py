"""Ranks that share a model give the results of one process."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    DeepseekV3ForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
)

from benchmarks.harness.engines import KERNELS
from kernels.cpu.operators import LANES
from services.worker.config.sparse_config import SparseConfig
from services.worker.models.registry import find_model, read_model_config
from services.worker.weights.online import ONLINE
from tests.services.worker.checkpoints import save_mimo, save_model
from tests.services.worker.ranks.rank_processes import Case, Texts, texts_alone, texts_of_ranks
from tests.services.worker.stored_codes import LAYOUTS, save_made_for_codes, save_quantized
from tests.services.worker.test_families import CASES
from tests.services.worker.test_mtp_families import FAMILIES, Checkpoint

WHOLE = {"enable_expert_parallel": True}
WIDE = {  # wide enough for native code on each of four ranks
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}
SOME_DRAFTS = {"speculative_config": {"draft_vocab_size": 91, "adaptive": False}}
TOLERANCE = 2e-5  # of logprobs between 0 and −13, in float32
REFUSED_LAYOUTS = ("gptq, desc_act",)


def assert_same(found: dict[str, list[Texts]], cases: dict[str, Case]) -> None:
    """Each rank has the outputs of one process; the ranks' logprobs are the same bits."""
    for name, case in cases.items():
        expected = texts_alone(case)
        first, *others = found[name]
        for texts in (first, *others):
            assert texts.ids == expected.ids, name
            assert texts.logprobs.tobytes() == first.logprobs.tobytes(), name
        difference = abs(first.logprobs - expected.logprobs).max()
        assert difference < TOLERANCE, f"{name}: {difference}"


def save(folder: Path, family: type[PreTrainedModel], **changes: Any) -> Path:
    folder.mkdir()
    save_model(folder, family, **changes)
    return folder


def save_with_head(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    save_mimo(folder, **changes)
    return folder


def save_odd_experts(folder: Path) -> Path:
    return save(folder, GptOssForCausalLM, **(CASES["gpt-oss"][1] | {"num_local_experts": 5}))


def save_codes(dense: Path, folder: Path, layout: str) -> Path:
    save_quantized(dense, folder, LAYOUTS[layout])
    return folder


def save_llama(folder: Path) -> Path:
    return save(folder, LlamaForCausalLM, vocab_size=161, intermediate_size=64, attention_bias=True)


def save_granite(folder: Path) -> Path:
    return save(
        folder,
        GraniteForCausalLM,
        num_key_value_heads=1,
        intermediate_size=128,
        attention_multiplier=0.25,
        residual_multiplier=0.3,
        mlp_bias=True,
        tie_word_embeddings=True,
    )


def save_moe(folder: Path) -> Path:
    moe = CASES["qwen2 moe"][1] | {"shared_expert_intermediate_size": 64}
    return save(folder, Qwen2MoeForCausalLM, **moe)


def test_two_ranks_have_the_texts_of_one_process(tmp_path: Path) -> None:
    """KV heads shared by ranks, drafts of an MTP head, an indivisible vocabulary, quantized
    weights, experts in parts (an odd number) and whole, and latents."""
    deepseek = CASES["deepseek v3, yarn"][1]
    codes = {"quantization": "wint4", "kv_cache_dtype": "int8", "embedding_quantization": "wint4"}
    cases = {
        "llama": Case(save_llama(tmp_path / "llama")),
        "mimo, native": Case(save_with_head(tmp_path / "mimo"), "native"),
        "qwen2 moe, whole, native": Case(save_moe(tmp_path / "moe"), "native", WHOLE),
        "granite, 4 bits": Case(save_granite(tmp_path / "granite"), "native", codes),
        "deepseek v3": Case(save(tmp_path / "latents", DeepseekV3ForCausalLM, **deepseek)),
        "gpt-oss, native": Case(save_odd_experts(tmp_path / "oss"), "native"),
    }
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    assert_same(found, cases)


@pytest.mark.slow
def test_two_ranks_have_the_texts_of_one_process_in_more_forms(tmp_path: Path) -> None:
    """Norms over all heads, drafts of some tokens, codes of a checkpoint, several threads."""
    llama, granite = save_llama(tmp_path / "llama"), save_granite(tmp_path / "granite")
    olmo = {"num_key_value_heads": 1, "attention_bias": True}
    save_made_for_codes(llama, tmp_path / "made")
    cases = {
        "granite": Case(granite),
        "granite, native": Case(granite, "native", {"num_threads": 2}),
        "qwen2 moe": Case(save_moe(tmp_path / "moe")),
        "qwen2 moe, native": Case(tmp_path / "moe", "native"),
        "mimo, some drafts, native": Case(save_with_head(tmp_path / "mimo"), "native", SOME_DRAFTS),
        "olmo 2, native": Case(save(tmp_path / "olmo", Olmo2ForCausalLM, **olmo), "native"),
        "llama, awq": Case(save_codes(llama, tmp_path / "awq", "awq")),
        "llama, made for codes": Case(tmp_path / "made", "native"),
    }
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    assert_same(found, cases)


def test_ranks_of_two_hosts_have_the_texts_of_one_process(tmp_path: Path) -> None:
    folder = save(tmp_path / "granite", GraniteForCausalLM, intermediate_size=128)
    cases = {"native": Case(folder, "native"), "torch": Case(folder)}
    with texts_of_ranks(cases, 2, tmp_path, num_hosts=2) as found:
        pass
    assert_same(found, cases)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_hosts"), [(2, 2), (4, 2), (4, 4)])
def test_ranks_of_several_hosts_have_the_bits_of_one_hosts(
    tmp_path: Path, size: int, num_hosts: int
) -> None:
    """By native code and by torch's operators, with experts and drafts of an MTP head."""
    moe = CASES["qwen2 moe"][1] | {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    }
    cases = {
        "qwen2 moe, native": Case(save(tmp_path / "moe", Qwen2MoeForCausalLM, **moe), "native"),
        "qwen2 moe, whole": Case(tmp_path / "moe", settings=WHOLE),
        "mimo": Case(save_with_head(tmp_path / "mimo")),
    }
    with texts_of_ranks(cases, size, tmp_path, num_hosts) as found:
        pass
    assert_same(found, cases)
    with texts_of_ranks(cases, size, tmp_path) as found_here:
        pass
    for name in cases:
        assert found[name][0].logprobs.tobytes() == found_here[name][0].logprobs.tobytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shared", [{}, WHOLE], ids=["parts", "whole experts"])
def test_ranks_have_the_texts_of_every_form_of_weights(
    tmp_path: Path, shared: dict[str, Any], size: int
) -> None:
    """Weights quantized at the start equal one process's with whole layers."""
    family, changes = CASES["qwen3 moe"]
    width = 128 * size  # every rank has whole groups
    sizes = {"hidden_size": width, "head_dim": width // 4, "moe_intermediate_size": width}
    sizes["num_experts"] = 4
    spread = 1.6 / width**0.5  # equal magnitude of logits at any width
    dense = save(tmp_path / "dense", family, **(changes | sizes), initializer_range=spread)
    cases: dict[str, Case] = {
        quantization: Case(dense, settings={"quantization": quantization, **shared})
        for quantization in ONLINE
    }
    for layout in LAYOUTS:
        if layout not in REFUSED_LAYOUTS:
            folder = save_codes(dense, tmp_path / layout, layout)
            cases[f"{layout}, stored"] = Case(folder, settings=shared)
    with texts_of_ranks(cases, size, tmp_path) as found:
        pass
    assert_same(found, cases)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("size", "num_hosts"), [(2, 1), (4, 1), (4, 2)])
def test_ranks_have_the_texts_of_every_family(
    tmp_path: Path, size: int, num_hosts: int, kernels: str
) -> None:
    """Native code computes families with wide enough heads."""
    mimo = save_with_head(tmp_path / "mimo", intermediate_size=WIDE["intermediate_size"])
    cases = {"mimo": Case(mimo, kernels)}
    for number, (name, (family, changes)) in enumerate(CASES.items()):
        folder = save(tmp_path / f"model-{number}", family, **(changes | WIDE))
        if kernels == "torch" or read_model_config(folder).head_dim % LANES == 0:
            cases[name] = Case(folder, kernels)
    with texts_of_ranks(cases, size, tmp_path, num_hosts) as found:
        pass
    assert_same(found, cases)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_whole_experts_have_the_texts_of_every_family(tmp_path: Path, size: int) -> None:
    """Also MTP heads with their own experts."""
    cases: dict[str, Case] = {}
    for name, head in FAMILIES.items():
        folder = tmp_path / f"head-{len(cases)}"
        folder.mkdir()
        cases[f"{name}, drafts"] = Case(Checkpoint(head, folder).folder, settings=WHOLE)
    for number, (name, (family, changes)) in enumerate(CASES.items()):
        is_sparse = issubclass(find_model([family.__name__]).Config, SparseConfig)
        if is_sparse and ", dense" not in name:
            folder = save(tmp_path / f"model-{number}", family, **changes)
            cases[name] = Case(folder, settings=WHOLE)
    with texts_of_ranks(cases, size, tmp_path) as found:
        pass
    assert_same(found, cases)
