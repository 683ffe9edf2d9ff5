"""Unfit weights are named before anything runs."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.engines import make_engine
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.weights.checkpoint import open_checkpoint
from services.worker.weights.load import load_model
from shared.errors import ConfigError
from shared.model_folder import weight_files
from tests.services.worker.checkpoints import change_config, save_mimo, save_qwen2

FLAT_LLAMA3 = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[DecoderLM, list[float]]:
    fractions: list[float] = []
    config = read_model_config(folder)
    model = load_model(
        folder, config, dtype, torch.device("cpu"), lambda text, done: fractions.append(done)
    )
    return model, fractions


def rewrite(file: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(file)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        weights.pop(key, None)
        if tensor is not None:
            weights[key] = tensor
    save_file(weights, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_qwen2(tmp_path, shard_size="10MB")
    return tmp_path


def test_shards_fill_every_parameter_and_report_progress(checkpoint: Path) -> None:
    num_files = len(weight_files(checkpoint))
    assert num_files >= 2
    model, fractions = load(checkpoint)
    weights: dict[str, torch.Tensor] = {}
    for file in weight_files(checkpoint):
        weights |= load_file(file)
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0, 1)
    assert len(fractions) == len(weights) + 1
    largest = max(tensor.nbytes for tensor in weights.values())
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    parts = [after - before for before, after in pairwise(fractions)]
    assert any(part == pytest.approx(largest / num_bytes) for part in parts), "by bytes"
    merged = model.get_parameter("model.layers.1.mlp.gate_up_proj.weight.values")
    halves = [weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    torch.testing.assert_close(merged, torch.cat(halves))


def test_the_head_is_float32_and_shared_only_where_that_is_exact(tmp_path: Path) -> None:
    save_qwen2(tmp_path, tie_word_embeddings=True)
    wide, _ = load(tmp_path)
    embedding = wide.get_parameter("model.embed_tokens.weight.values")
    assert wide.get_parameter("lm_head.weight.values") is embedding
    narrow, _ = load(tmp_path, torch.bfloat16)
    assert narrow.get_parameter("model.embed_tokens.weight.values").dtype == torch.bfloat16
    torch.testing.assert_close(
        narrow.get_parameter("lm_head.weight.values"), embedding, atol=0, rtol=0
    )


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder / "model.safetensors", model__layers__1__self_attn__k_proj__bias=None)
    with pytest.raises(ConfigError, match=r"lacks tensors model.layers.1.self_attn.k_proj.bias$"):
        load(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    change_config(folder, num_hidden_layers=5)
    with pytest.raises(ConfigError, match="and 19 more"):
        load(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    rewrite(folder / "model.safetensors", model__surprise=torch.zeros(2))
    with pytest.raises(ConfigError, match=r"has no tensor model\.surprise"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["k_scale", "v_scale", "kv_scale", "k_proj.k_scale", "v_proj.v_scale"]
)
def test_scales_of_a_kv_cache_are_left_out_and_the_log_says_so(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = {f"model.layers.{layer}.self_attn.{name}": torch.ones(()) for layer in range(2)}
    rewrite(folder / "model.safetensors", **scales)
    with caplog.at_level("INFO"):
        load(folder)
    assert caplog.text.count("scales of keys and values are not used") == 1


def test_a_head_beside_tied_embeddings_is_fine(tmp_path: Path) -> None:
    save_qwen2(tmp_path, shard_size="10MB", tie_word_embeddings=True)
    rewrite(tmp_path / "model.safetensors", lm_head__weight=torch.zeros(160, 32))
    model, _ = load(tmp_path)
    assert model.get_parameter("lm_head.weight.values").abs().max() > 0


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    change_config(folder, intermediate_size=50)
    with pytest.raises(ConfigError, match=r"_proj.weight is .*\[(96, 64|64, 96)\].*50"):
        load(folder)


def test_integers_are_no_weights(folder: Path) -> None:
    rewrite(folder / "model.safetensors", model__norm__weight=torch.zeros(32, dtype=torch.int8))
    with pytest.raises(ConfigError, match=r"model.norm.weight is torch.int8"):
        load(folder)


def test_a_name_in_two_files_is_refused_with_both(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    first, *_, last = weight_files(tmp_path)
    rewrite(last, model__embed_tokens__weight=torch.zeros(160, 64))
    problem = rf"{first.name} and .*{last.name} both hold tensor model.embed_tokens.weight"
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path)


def test_unneeded_tensors_are_not_read(tmp_path: Path) -> None:
    """Pages of the file in memory: a tensor takes 16 MiB, a row 4 KiB, which is a page."""
    file = tmp_path / "model.safetensors"
    save_file({name: torch.ones(4096, 1024) for name in "ab"}, file)
    tensor = open_checkpoint([file]).find("b")
    assert tensor is not None
    assert (tensor.shape, tensor.dtype) == ([4096, 1024], torch.float32)
    assert mapped_bytes(file) < 1 << 20
    assert tensor.read(0, 2048, 1024).sum() == 1024 * 1024
    assert 4 << 20 <= mapped_bytes(file) < 8 << 20
    assert tensor.read(1, 1000, 24).sum() == 4096 * 24
    assert mapped_bytes(file) < 20 << 20


def mapped_bytes(file: Path) -> int:
    """Bytes of ``file`` in this process's memory."""
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    ours = [each for each in maps if f"{file}\n" in each]
    assert ours, "it is not mapped"
    return sum(int(size) << 10 for each in ours for size in re.findall(r"\nRss: +(\d+) kB", each))


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model.safetensors is not a valid safetensors file"):
        load(folder)


def test_mtp_layers_must_be_complete(tmp_path: Path) -> None:
    save_mimo(tmp_path)
    rewrite(tmp_path / "model.safetensors", model__mtp_layers__0__input_proj__weight=None)
    with pytest.raises(ConfigError, match=r"model.mtp_layers.0.input_proj.weight"):
        load(tmp_path)


def test_an_unknown_architecture_lists_the_known_ones(folder: Path) -> None:
    name = "Qwen2VLForConditionalGeneration"
    change_config(folder, architectures=[name], vocab_size=None, hidden_size=None)
    with pytest.raises(ConfigError, match=rf"{name} is not.*Llama.*, MiMo.*, Qwen2ForCausalLM"):
        make_engine(folder, model_impl="shoal")


def test_a_config_without_architectures_lists_them_too(folder: Path) -> None:
    change_config(folder, architectures=None)
    with pytest.raises(ConfigError, match=r"architecture missing is not supported; .*Qwen2For"):
        make_engine(folder)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope type 'longrope' is not.*llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional'"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear'.*required field `factor`"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, r"rope type 'yarn'.*> 0.*\$.factor"),
        ({"rope_scaling": FLAT_LLAMA3}, r"high_freq_factor 1.0 must be more than .* 1.0"),
        ({"rope_parameters": {"full_attention": {}}}, "of their own for 'full_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"num_attention_heads": 0}, r"Expected `int` >= 1 - at `\$.num_attention_heads`"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types chunked_attention is not"),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types has 1 entries; num_hidden_layers is 3",
        ),
        ({"sliding_window": 0}, r"Expected `int` >= 1 - at `\$.sliding_window`"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"hidden_size": "many"}, "Expected `int`"),
    ],
)
def test_a_checkpoint_we_cannot_load_is_an_error(
    folder: Path, change: dict[str, object], text: str
) -> None:
    change_config(folder, **change)
    with pytest.raises(ConfigError, match=text):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("change", "base"),
    [
        ({"rope_parameters": None, "rope_theta": 500.0}, 500.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, 700.0),
        ({"rope_parameters": None}, 10000.0),
    ],
)
def test_rope_theta_is_found_in_either_place(
    folder: Path, change: dict[str, object], base: float
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_theta", None)
    (folder / "config.json").write_text(json.dumps(config | change))
    assert read_model_config(folder).rope.rope_theta == base
