"""A rank's part of a model, and sizes that ranks cannot share."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from services.worker.layers.attention import Attention
from services.worker.layers.mlp import GatedMLP
from services.worker.layers.parallel import Parallel
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.weights.checkpoint import StoredTensor
from services.worker.weights.load import build_model, load_model
from services.worker.weights.online import Quantization
from shared.errors import ConfigError
from tests.services.worker.checkpoints import save_model, save_qwen2
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_families import CASES
from tests.services.worker.test_native import experts_of

CPU = torch.device("cpu")
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}  # of three ranks


def test_a_rank_has_its_heads_and_its_part_of_the_mlp(tmp_path: Path) -> None:
    save_qwen2(tmp_path)
    config = read_model_config(tmp_path)
    for size, num_heads, num_kv_heads in ((1, 4, 2), (2, 2, 1), (4, 1, 1)):
        model = build_model(config, torch.float32, CPU, Parallel(size - 1, size))
        layer = model.model.layers[0]
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.self_attn, Attention)
        assert isinstance(layer.mlp, GatedMLP)
        spec = layer.self_attn.heads.spec
        assert (spec.num_heads, spec.num_kv_heads) == (num_heads, num_kv_heads)
        assert layer.self_attn.o_proj.weight.values.shape == (64, num_heads * 16)
        assert layer.mlp.gate_up_proj.weight.values.shape == (2 * 96 // size, 64)
        assert layer.mlp.down_proj.weight.values.shape == (64, 96 // size)
        assert layer.mlp.down_proj.is_partial == (size > 1)
        assert not layer.mlp.gate_up_proj.is_partial
        assert model.model.embed_tokens.weight.values.shape == (160 // size, 64)
        assert model.lm_head is not None
        assert model.lm_head.weight.values.shape == (160 // size, 64)


def test_an_indivisible_size_is_named_with_the_divisible_ones(tmp_path: Path) -> None:
    save_qwen2(tmp_path)
    config = read_model_config(tmp_path)
    for parallel, problem in (
        (Parallel(1, 3), "num_attention_heads 4 with .* 2 cannot .* 3 ranks; 1, 2, 4 would work"),
        (Parallel(7, 8), "num_attention_heads 4 with num_key_value_heads 2 .* over 8 ranks"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build_model(config, torch.float32, CPU, parallel)
    with pytest.raises(ConfigError, match=r"value_heads 4 .* over 6 ranks; 1, 2, 4, 12 would work"):
        Parallel(0, 6).heads(12, 4)
    with pytest.raises(ConfigError, match=r"intermediate_size 50 .* 4 ranks; 1, 2, 5, 10, 25, 50 "):
        Parallel(0, 4).inner(50)
    with pytest.raises(ConfigError, match=r"vocab_size 9 cannot be split over 8 ranks; 1, 2, 3, 5"):
        Parallel(0, 8).vocabulary(9)
    with pytest.raises(ConfigError, match=r"3 whole experts .* over 4 ranks; 1, 2, 3 would work"):
        Parallel(0, 4, has_whole_experts=True).experts(3, 50)


def test_a_vocabulary_need_not_divide() -> None:
    shards = [Parallel(rank, 4).vocabulary(161) for rank in range(4)]
    assert [(each.start, each.num) for each in shards] == [(0, 41), (41, 41), (82, 41), (123, 38)]


@pytest.mark.parametrize("quantization", ["wint4", "nf4"])
def test_a_shard_that_would_cut_a_group_is_refused(
    tmp_path: Path, quantization: Quantization
) -> None:
    save_qwen2(tmp_path, hidden_size=128, intermediate_size=192)
    with pytest.raises(
        ConfigError, match=r"_proj.weight: \d+ inputs of which \d+ share a scale .* 4 ranks; 1, 2"
    ):
        load_shard(tmp_path, Parallel(1, 4), quantization)


def test_codes_whose_inputs_have_an_order_are_refused(tmp_path: Path) -> None:
    save_qwen2(tmp_path / "dense")
    save_quantized(tmp_path / "dense", tmp_path / "codes", LAYOUTS["gptq, desc_act"])
    with pytest.raises(ConfigError, match=r"o_proj: inputs in an order of their own .* 2 ranks"):
        load_shard(tmp_path / "codes", Parallel(1, 2))


def test_a_rank_has_whole_experts_and_reads_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, Qwen3MoeForCausalLM, **(CASES["qwen3 moe"][1] | HEADS))
    whole = load_shard(tmp_path, Parallel(0, 1))
    names = []
    read = StoredTensor.read

    def noted(stored: StoredTensor, dim: int, start: int, num: int) -> torch.Tensor:
        names.append(stored.name)
        return read(stored, dim, start, num)

    monkeypatch.setattr(StoredTensor, "read", noted)
    shard = load_shard(tmp_path, Parallel(1, 3, has_whole_experts=True))
    for ours, theirs in zip(experts_of(shard), experts_of(whole), strict=True):
        assert (ours.first, len(ours.products), ours.is_partial) == (2, 3, True)
        for own, same in zip(ours.products, theirs.products[2:5], strict=True):
            assert torch.equal(own.gate_up_proj.weight.values, same.gate_up_proj.weight.values)
            assert torch.equal(own.down_proj.weight.values, same.down_proj.weight.values)
    numbers = {name.split(".")[5] for name in names if ".experts." in name}
    assert numbers == {"2", "3", "4"}


def load_shard(folder: Path, parallel: Parallel, quantization: Quantization = "none") -> DecoderLM:
    config = read_model_config(folder)
    return load_model(
        folder, config, torch.float32, CPU, lambda *_: None, parallel, quantization=quantization
    )


def test_a_rank_reads_its_share_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_qwen2(tmp_path)
    sizes = []
    read = StoredTensor.read

    def counted(stored: StoredTensor, dim: int, start: int, num: int) -> torch.Tensor:
        part = read(stored, dim, start, num)
        sizes.append(part.numel())
        return part

    monkeypatch.setattr(StoredTensor, "read", counted)
    load_shard(tmp_path, Parallel(0, 1))
    num_alone = sum(sizes)
    sizes.clear()
    load_shard(tmp_path, Parallel(1, 2))
    assert sum(sizes) < 0.51 * num_alone, "all but norms"
