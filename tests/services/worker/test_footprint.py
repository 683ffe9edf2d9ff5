"""A plan's memory of a model equals that of a worker that loads it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.engines import make_engine
from cli.plan.cards import CARDS
from cli.plan.footprint import footprint_of
from cli.plan.machine import fit_here, fit_on
from services.worker.models.registry import read_model_config
from services.worker.weights.dummy import make_dummy
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Group
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.stored_codes import LAYOUTS, save_quantized

CPU = torch.device("cpu")
GB = 1e9
GEMMA_4_31B: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 262_144,
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# As published with Llama-2-70B and DeepSeek-R1-Distill-Llama-70B.
LLAMA_2_70B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA_3_70B = LLAMA_2_70B | {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}


def settings_of(tmp_path: Path, config: dict[str, Any], **settings: Any) -> WorkerConfig:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return WorkerConfig(model=str(tmp_path), dtype="bfloat16", **settings)


@pytest.mark.parametrize("form", ["none", "wint8", "wint4", "fp8_block"])
def test_weights_estimated_from_a_config_match_the_loaded_ones(tmp_path: Path, form: Any) -> None:
    settings = settings_of(tmp_path, TINY, quantization=form)
    model = make_dummy(read_model_config(tmp_path), torch.bfloat16, CPU, form)
    loaded = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    head = 1000 * 128 * 2  # torch's GEMMs on a CPU also keep theirs in float32
    assert footprint_of(settings, CPU).requirements.weights == pytest.approx(
        loaded - head, rel=0.03
    )


@pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
def test_embeddings_in_codes_are_counted_once(tmp_path: Path, is_tied: bool) -> None:
    settings = settings_of(
        tmp_path, TINY | {"tie_word_embeddings": is_tied}, embedding_quantization="wint8"
    )
    model = make_dummy(read_model_config(tmp_path), torch.bfloat16, CPU, embedding="wint8")
    loaded = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    wider = 0 if is_tied else 1000 * 128 * 2  # of the head, which torch keeps in float32 on a CPU
    found = footprint_of(settings, CPU)
    assert found.requirements.weights == pytest.approx(loaded - wider, rel=0.001)
    dense = footprint_of(settings.model_copy(update={"embedding_quantization": "none"}), CPU)
    assert dense.requirements.weights - found.requirements.weights == 1000 * (128 - 4)
    assert dense.read_by(1) - found.read_by(1) == (1000 * (128 - 4) if is_tied else 0)
    both = settings.model_copy(update={"lm_head_quantization": "wint8"})
    assert (footprint_of(both, CPU) == found) == is_tied


def test_of_weights_that_are_codes_already_embeddings_may_be_quantised(tmp_path: Path) -> None:
    save_quantized(EMBEDDED_MODEL, tmp_path / "gptq", LAYOUTS["gptq"])
    settings = WorkerConfig(model=str(tmp_path / "gptq"), dtype="bfloat16")
    plain = footprint_of(settings, CPU)
    found = footprint_of(settings.model_copy(update={"embedding_quantization": "wint8"}), CPU)
    assert plain.requirements.weights - found.requirements.weights == 8192 * (256 - 4)


@pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
def test_a_head_in_codes_is_counted_beside_embeddings_that_stay(
    tmp_path: Path, is_tied: bool
) -> None:
    settings = settings_of(
        tmp_path, TINY | {"tie_word_embeddings": is_tied}, lm_head_quantization="wint8"
    )
    model = make_dummy(read_model_config(tmp_path), torch.bfloat16, CPU, head="wint8")
    loaded = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    found = footprint_of(settings, CPU)
    assert found.requirements.weights == pytest.approx(loaded, rel=0.03)
    dense = footprint_of(settings.model_copy(update={"lm_head_quantization": "none"}), CPU)
    assert dense.read_by(1) - found.read_by(1) == 1000 * 128 - 1000 * 4


def test_weights_that_are_codes_already_are_counted_as_they_are(tmp_path: Path) -> None:
    save_quantized(EMBEDDED_MODEL, tmp_path / "gptq", LAYOUTS["gptq"])
    found = footprint_of(WorkerConfig(model=str(tmp_path / "gptq")), CPU)
    stored = sum(path.stat().st_size for path in (tmp_path / "gptq").glob("*.safetensors"))
    assert found.requirements.weights == pytest.approx(stored, rel=0.01)
    assert found.read_by(1) < footprint_of(WorkerConfig(), CPU).read_by(1)


def test_a_token_reads_the_experts_that_it_chooses(tmp_path: Path) -> None:
    found = footprint_of(settings_of(tmp_path, TINY), CPU)
    expert = 3 * 128 * 96 * 2
    assert found.routed == 3 * 8 * expert
    assert found.read_by(1) == pytest.approx(found.always + 3 * 2 * expert)
    assert found.read_by(100) == pytest.approx(found.always + found.routed, rel=1e-3)


def test_the_embedded_model_has_its_mtp_head_in_the_sum() -> None:
    with_drafts = footprint_of(WorkerConfig(), CPU)
    without = footprint_of(WorkerConfig(speculative_config={"method": "none"}), CPU)
    assert with_drafts.kv_per_token > without.kv_per_token


def test_rows_of_the_head_for_drafts_are_in_the_sum() -> None:
    """Of 1000 tokens: 256 elements in bfloat16, and an id."""
    speculation = {"draft_vocab_size": 1000}
    limited = footprint_of(WorkerConfig(dtype="bfloat16", speculative_config=speculation), CPU)
    whole = footprint_of(WorkerConfig(dtype="bfloat16"), CPU)
    added = limited.requirements.weights - whole.requirements.weights
    assert added == 1000 * (256 * 2 + 8)
    assert limited.parameters == whole.parameters
    assert limited.read_by(1) == whole.read_by(1)


def test_layers_with_windows_take_the_blocks_of_a_worker(tmp_path: Path) -> None:
    """Two of four layers have a window: a block has room for two."""
    save_family(tmp_path, "GptOssForCausalLM", max_position_embeddings=4096)
    limits: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 8}
    engine = make_engine(tmp_path, "native", **limits)
    settings = WorkerConfig(model=str(tmp_path), dtype="float32", device="cpu", **limits)
    found = footprint_of(settings, CPU)
    fit = fit_here(settings, found, CPU)
    assert fit.capacity.groups == engine.capacity.groups == (Group(), Group(5))
    assert fit.capacity.num_blocks == engine.capacity.num_blocks
    of_layers = {each.entries.data_ptr(): each.entries for each in engine._kv_cache.layers}
    assert found.requirements.block == sum(each[0].nbytes for each in of_layers.values())
    assert found.kv_per_token == 2 * found.requirements.block // 16
    assert fit.num_tokens(4096) > 1.8 * fit.num_tokens(100)


@pytest.mark.parametrize(("length", "times"), [(8_192, 2.2), (32_768, 5.6), (262_144, 9.8)])
def test_blocks_of_gemma_4_have_as_many_bytes_for_each_group(
    tmp_path: Path, length: int, times: float
) -> None:
    """As published with Gemma 4 31B: 50 layers have a window and twice the entry of the other 10,
    in groups of 5."""
    limits = {"max_model_len": length, "max_num_batched_tokens": 2_048}
    found = footprint_of(settings_of(tmp_path, GEMMA_4_31B, **limits), CPU)
    capacity = found.requirements.capacity
    assert capacity.groups == (Group(), *[Group(1024)] * 10)
    assert found.requirements.block == 16 * 5 * 2 * 16 * 256 * 2
    of_one_group = found.kv_per_token * capacity.max_model_len
    own = found.requirements.block * found.requirements.blocks_per_request
    assert of_one_group / own == pytest.approx(times, rel=0.03)


def test_published_sums_come_out(tmp_path: Path) -> None:
    """Llama-2-70B has 70 billion parameters: 140 GB, and 35 in NF4; common estimates leave out
    group scales and dense embeddings and head, and count all query heads in the KV cache instead of
    eight."""
    dense = footprint_of(settings_of(tmp_path, LLAMA_2_70B), CPU)
    assert dense.parameters.total == pytest.approx(69.0e9, rel=0.01)
    assert dense.requirements.weights == pytest.approx(138 * GB, rel=0.01)
    assert dense.kv_per_token == 2 * 80 * 8 * 128 * 2
    nf4 = footprint_of(settings_of(tmp_path, LLAMA_2_70B, quantization="nf4"), CPU)
    dense_numbers = 2 * 32000 * 8192
    groups = (dense.parameters.total - dense_numbers) / 64
    by_hand = (dense.parameters.total - dense_numbers) / 2 + 2 * groups + 2 * dense_numbers
    assert nf4.requirements.weights == pytest.approx(by_hand, rel=0.001)


def test_cards_share_a_model_that_none_of_them_holds(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, LLAMA_3_70B, max_model_len=8192)
    found = footprint_of(settings, CPU)
    assert fit_on(CARDS["h100"], settings, found).num_cards == 2
    assert fit_on(CARDS["a100-40"], settings, found).num_cards == 4
    quantised = settings_of(tmp_path, LLAMA_3_70B, max_model_len=8192, quantization="nf4")
    assert fit_on(CARDS["h100"], quantised, footprint_of(quantised, CPU)).num_cards == 1


def test_a_gpu_holds_tables_for_changes_of_logits(tmp_path: Path) -> None:
    """8 bytes for each token of the vocabulary and each slot, the null slot too."""
    settings = settings_of(tmp_path, TINY, max_num_seqs=32)
    found = footprint_of(settings, CPU)
    on_card = fit_on(CARDS["h100"], settings, found).memory.requirements
    tables = 33 * 1000 * 8
    assert on_card.peak - found.requirements.peak == pytest.approx(tables, rel=0.01)
