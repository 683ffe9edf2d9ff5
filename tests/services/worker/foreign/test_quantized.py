"""Quantized checkpoints of models that transformers computes: the texts of the dequantized ones."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import MiniMaxM2ForCausalLM

from benchmarks.harness.engines import make_engine
from services.worker.foreign.backend import can_serve
from services.worker.foreign.coded import CodedExperts, CodedLinear, stack_experts
from services.worker.layers.weights import Quantized
from services.worker.weights.online import quantize_fp8_block, quantize_int4
from shared.errors import ConfigError
from tests.selection import only
from tests.services.worker.checkpoints import (
    assert_greedy,
    change_config,
    random_prompts,
    save_model,
)
from tests.services.worker.driver import Driver, Job
from tests.services.worker.foreign_checkpoints import save_family, save_with_images
from tests.services.worker.stored_codes import (
    LAYOUTS,
    MORE_LAYOUTS,
    save_mxfp4_experts,
    save_quantized,
)
from tests.services.worker.test_memory import planned_bytes
from tests.services.worker.test_quantized_models import with_values

EVERY = LAYOUTS | MORE_LAYOUTS
MIMO, GLM, OLMO = "MiMoV2FlashForCausalLM", "Glm4MoeForCausalLM", "Olmo2ForCausalLM"
MINIMAX: dict[str, Any] = {
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "intermediate_size": 32,
    "rotary_dim": 8,
}
EXPERTS = "model.layers.1.mlp.experts"


def save_codes(folder: Path, layout: str, ends: tuple[str, ...] = ()) -> Any:
    """Quantizes ``folder / "dense"`` into ``folder / "codes"``. Returns transformers' model of the
    values."""
    values = save_quantized(folder / "dense", folder / "codes", EVERY[layout], ends)
    return with_values(folder / "dense", values, folder / "values")


def assert_texts(oracle: Any, folder: Path) -> list[nn.Module]:
    """Texts in chunks are the oracle's. Returns the modules of the trunk."""
    engine = make_engine(folder, model_impl="transformers")
    prompts = random_prompts(4)
    texts = Driver(engine, [3, 7, 1, 5]).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)
    assert can_serve(folder, 64)
    return list(engine._model.base.modules())


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """By their names with _ for a dot; None removes one."""
    file = folder / "codes" / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(file), **changes}
    save_file({name: each for name, each in tensors.items() if each is not None}, file)


@pytest.mark.parametrize(
    "layout", only([(each,) for each in ("gptq, desc_act", "fp8", "bitsandbytes", "mxfp8")], EVERY)
)
def test_every_layout_stays_in_codes_and_has_the_texts_of_its_values(
    tmp_path: Path, layout: str
) -> None:
    save_family(tmp_path / "dense", MIMO, v_head_dim=16)
    modules = assert_texts(save_codes(tmp_path, layout), tmp_path / "codes")
    linears = [each for each in modules if isinstance(each, CodedLinear)]
    assert len(linears) == 4 * 4 + 3  # the first layer has no experts
    assert all(isinstance(each.weight, Quantized) for each in linears)
    assert sum(isinstance(each, CodedExperts) for each in modules) == 3


@pytest.mark.parametrize(
    "family",
    only(
        [("DeepseekV3ForCausalLM",), ("Phi3ForCausalLM",), ("Cohere2ForCausalLM",)],
        [GLM, OLMO, "DeepseekV3ForCausalLM", "Phi3ForCausalLM", "Cohere2ForCausalLM"],
    ),
)
def test_families_have_the_texts_of_the_values(tmp_path: Path, family: str) -> None:
    """Latents, shared experts, projections in one weight, tied heads, biases."""
    save_family(tmp_path / "dense", family, pad_token_id=0)
    assert_texts(save_codes(tmp_path, "mxfp8"), tmp_path / "codes")


@pytest.mark.parametrize(("moe_intermediate_size", "rows"), [(32, 96), (64, 128)])
def test_the_largest_weight_that_a_step_decodes_is_planned(
    tmp_path: Path, moe_intermediate_size: int, rows: int
) -> None:
    """A network of the first layer, or an expert's gates and ups: in float32 and in the dtype."""
    sizes = {"v_head_dim": 16, "moe_intermediate_size": moe_intermediate_size}
    save_family(tmp_path / "dense", MIMO, **sizes)
    save_quantized(tmp_path / "dense", tmp_path / "codes", LAYOUTS["fp8"])
    peaks = []
    for name in ("dense", "codes"):
        make_engine(tmp_path / name, model_impl="transformers")
        peaks.append(planned_bytes("peak") or 0)
    assert peaks[1] - peaks[0] == rows * 64 * (4 + 4)


def test_values_have_the_dtype_of_the_model(tmp_path: Path, glm: Path) -> None:
    save_quantized(glm, tmp_path / "codes", LAYOUTS["fp8"])
    engine = make_engine(tmp_path / "codes", model_impl="transformers", dtype="bfloat16")
    linears = [each for each in engine._model.base.modules() if isinstance(each, CodedLinear)]
    assert {each.weight.values.dtype for each in linears} == {torch.bfloat16}


def test_experts_with_other_names_and_a_head_in_codes(tmp_path: Path) -> None:
    """The head becomes values, which are float32 here."""
    save_model(tmp_path / "dense", MiniMaxM2ForCausalLM, **MINIMAX)
    oracle = save_codes(tmp_path, "compressed-tensors", ("w1", "w2", "w3", "lm_head"))
    modules = assert_texts(oracle, tmp_path / "codes")
    assert sum(isinstance(each, CodedExperts) for each in modules) == 3


def test_the_texts_of_a_model_with_images_are_in_codes(tmp_path: Path) -> None:
    save_with_images(tmp_path / "dense")
    modules = assert_texts(save_codes(tmp_path, "compressed-tensors"), tmp_path / "codes")
    assert sum(isinstance(each, CodedLinear) for each in modules) == 4 * 7  # not the tower's


def test_a_layer_with_an_expert_of_values_has_no_codes(tmp_path: Path) -> None:
    save_family(tmp_path / "dense", GLM)
    values = save_quantized(tmp_path / "dense", tmp_path / "codes", LAYOUTS["fp8"])
    name = f"{EXPERTS}.2.up_proj.weight"
    change_tensors(tmp_path, **{name: values[name], f"{name}_scale_inv": None})
    modules = assert_texts(
        with_values(tmp_path / "dense", values, tmp_path / "values"), tmp_path / "codes"
    )
    assert sum(isinstance(each, CodedExperts) for each in modules) == 2


@pytest.mark.parametrize(
    ("device", "num", "forms", "are_codes"),
    [
        ("cpu", 8, (quantize_fp8_block, quantize_int4), False),
        ("cpu", 4, (quantize_int4, quantize_int4), True),
        ("cuda", 8, (quantize_int4, quantize_int4), True),
        ("cuda", 4, (quantize_int4, quantize_int4), False),
    ],
)
def test_experts_in_two_forms_or_without_a_kernel_are_not_stacked(
    device: str, num: int, forms: tuple[Any, Any], are_codes: bool
) -> None:
    parts = [form(torch.randn(num, 64)) for form in forms]
    values = [each.values for each in parts]
    found = stack_experts(parts, device)
    assert (found is not None) == are_codes
    if found is not None:
        codes = found.as_codes
        assert all(torch.equal(codes.expert(i).values(torch.float32), values[i]) for i in (0, 1))


DAMAGED: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "an unknown tensor": (
        "fp8",
        {"model.layers.0.self_attn.q_proj.weight_twist": torch.ones(1)},
        r"model.safetensors: the architecture has no tensor .*q_proj\.weight_twist",
    ),
    "an unknown layer": (
        "fp8",
        {
            "model.layers.9.self_attn.q_proj.weight": torch.ones(32, 32).to(torch.float8_e4m3fn),
            "model.layers.9.self_attn.q_proj.weight_scale_inv": torch.ones(1, 1),
        },
        r"the architecture has no tensor model\.layers\.9\.self_attn\.q_proj",
    ),
    "codes without scales": (
        "fp8",
        {"model.layers.0.self_attn.q_proj.weight_scale_inv": None},
        r"q_proj\.weight is torch.float8_e4m3fn \[64, 64\], without scales",
    ),
    "scales of another size": (
        "fp8",
        {"model.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(3, 2)},
        r"layer .*q_proj: scales \[3, 2\] for blocks of",
    ),
    "scales of another size in an expert": (
        "fp8",
        {f"{EXPERTS}.1.up_proj.weight_scale_inv": torch.ones(3, 2)},
        r"layer .*experts\.1\.up_proj: scales \[3, 2\] for blocks of",
    ),
    "a layer of another size": (
        "fp8",
        {
            "model.layers.0.self_attn.q_proj.weight": torch.ones(32, 64).to(torch.float8_e4m3fn),
            "model.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1, 2),
        },
        r"q_proj is quantised and \[32, 64\]; the architecture has \[64, 64\]",
    ),
    "an expert of another size": (
        "fp8",
        {
            f"{EXPERTS}.1.up_proj.weight": torch.ones(64, 64).to(torch.float8_e4m3fn),
            f"{EXPERTS}.1.up_proj.weight_scale_inv": torch.ones(2, 2),
        },
        r"experts.1.up_proj is quantised and \[64, 64\]; the architecture has \[32, 64\]",
    ),
    "an expert less": (
        "fp8",
        {f"{EXPERTS}.3.up_proj.weight": None, f"{EXPERTS}.3.up_proj.weight_scale_inv": None},
        r"has 3 tensors .*up_proj.* for model\.layers\.1\.mlp\.experts\.gate_up_proj; .* has 4",
    ),
    "a layer less": (
        "awq",
        {f"model.layers.0.self_attn.q_proj.{end}": None for end in ("qweight", "qzeros", "scales")},
        r"lacks tensors.*layers\.0\.self_attn\.q_proj",
    ),
    "codes less": (
        "awq",
        {"model.layers.0.self_attn.q_proj.qweight": None},
        r"the architecture has no tensor model\.layers\.0\.self_attn\.q_proj\.(qzeros|scales)",
    ),
    "a biased expert": (
        "fp8",
        {f"{EXPERTS}.1.up_proj.bias": torch.ones(32)},
        r"the architecture has no tensor .*experts\.1\.up_proj\.bias",
    ),
}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    save_family(folder / "dense", GLM)
    return folder / "dense"


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_folders_are_refused_by_the_tensors_name(
    tmp_path: Path, glm: Path, name: str
) -> None:
    layout, changes, reason = DAMAGED[name]
    save_quantized(glm, tmp_path / "codes", LAYOUTS[layout])
    change_tensors(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reason):
        make_engine(tmp_path / "codes", model_impl="transformers")


def test_tensors_of_drafts_and_of_the_cache_are_left_out(tmp_path: Path, glm: Path) -> None:
    """GLM's draft layer comes after the last one."""
    values = save_quantized(glm, tmp_path / "codes", LAYOUTS["fp8"])
    shutil.copytree(glm, tmp_path / "dense")
    change_tensors(
        tmp_path,
        **{
            "model.layers.4.eh_proj.weight": torch.ones(64, 128),
            "model.mtp.layers.0.input_layernorm.weight": torch.ones(64),
            "model.layers.0.self_attn.k_scale": torch.ones(1),
        },
    )
    change_config(tmp_path / "codes", num_nextn_predict_layers=1)
    assert_texts(with_values(tmp_path / "dense", values, tmp_path / "values"), tmp_path / "codes")


def test_layers_that_transformers_transposes_are_refused(tmp_path: Path) -> None:
    save_family(tmp_path / "dense", "GPT2LMHeadModel")
    save_quantized(tmp_path / "dense", tmp_path / "codes", LAYOUTS["bitsandbytes"])
    with pytest.raises(ConfigError, match=r"c_proj is quantised; .* \(Conv1D\)"):
        make_engine(tmp_path / "codes")


def test_stacks_of_mxfp4_are_refused(tmp_path: Path) -> None:
    save_family(tmp_path / "dense", "GptOssForCausalLM")
    save_mxfp4_experts(tmp_path / "dense", tmp_path / "codes")
    with pytest.raises(ConfigError, match=r"no tensor .*experts\.(down|gate_up)_proj_blocks"):
        make_engine(tmp_path / "codes", model_impl="transformers")


def test_unknown_methods_and_dummy_weights_are_refused(tmp_path: Path, glm: Path) -> None:
    save_quantized(glm, tmp_path / "codes", LAYOUTS["fp8"])
    with pytest.raises(ConfigError, match="dummy makes dense weights"):
        make_engine(tmp_path / "codes", model_impl="transformers", load_format="dummy")
    change_config(tmp_path / "codes", quantization_config={"quant_method": "hqq"})
    assert not can_serve(tmp_path / "codes", 64)
    with pytest.raises(ConfigError, match="quant_method 'hqq' is not supported"):
        make_engine(tmp_path / "codes", model_impl="transformers")


def test_mixtures_of_experts_can_be_served(glm: Path) -> None:
    assert can_serve(glm, 64)
