"""Quantized checkpoints are dequantized as by their own tools."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.cpu.library import load_library
from kernels.cpu.operators import LANES, Kind, Operator
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import Buffer, NativeProgram
from services.worker.layers.weights import Dense, Quantized, Weight
from services.worker.weights.checkpoint import open_checkpoint
from services.worker.weights.load import find_layer
from services.worker.weights.schemes import find_scheme
from services.worker.weights.schemes.scheme import StoredCodes
from services.worker.weights.stacked_experts import GPT_OSS, StackedExperts
from shared.errors import ConfigError
from tests.services.worker.builds import each_variant

GOLDEN = Path(__file__).parent / "golden"
EXPERTS, FIRST_EXPERTS = "mxfp4-experts", "model.layers.0.mlp.experts"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
ROUNDED_TWICE = "bitsandbytes-int8"  # once for the scale, once for 1/127


MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "ch_axis": -1,
    "group_size": 32,
    "scale_format": "e8m0",
}
AWQ: dict[str, Any] = {"name": "awq", "scaling_layers": []}
ROTATION = {"name": "rotation", "r1": True, "r2": True, "r3": False, "r4": False}


def quark(**config: Any) -> dict[str, Any]:
    return {"quant_method": "quark", **config}


def as_bytes(**state: Any) -> Tensor:
    return torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)


def config_of(name: str) -> dict[str, Any]:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return dict(config["quantization_config"])


def expected_layers(name: str) -> dict[str, Tensor]:
    """Each expert's weights separately, by our names."""
    tensors = load_file(GOLDEN / name / "expected.safetensors")
    if name != EXPERTS:
        return tensors
    return {
        f"{FIRST_EXPERTS}.{expert}.{part}_proj.weight": whole[GPT_OSS.outputs(part, len(whole))]
        for part, stack in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down"))
        for expert, whole in enumerate(tensors[f"{FIRST_EXPERTS}.{stack}_proj.weight"])
    }


def read_layers(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Weight]:
    """The layers in ``expected_layers``."""
    checkpoint = StackedExperts(open_checkpoint([GOLDEN / name / "model.safetensors"]), GPT_OSS)
    found = {}
    for layer, expected in expected_layers(name).items():
        stored = find_layer(checkpoint, layer, find_scheme(config_of(name)))
        assert isinstance(stored, StoredCodes)
        assert stored.shape == list(expected.shape)
        found[layer] = stored.read(dtype)
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_codes_are_read_like_by_the_tool_that_wrote_them(name: str) -> None:
    expected = expected_layers(name)
    found = read_layers(name)
    assert found.keys() == expected.keys()
    for layer, weight in found.items():
        assert isinstance(weight, Dense if name == "bitsandbytes-nf4-across-rows" else Quantized)
        if name == ROUNDED_TWICE:
            assert torch.allclose(weight.values, expected[layer], rtol=1e-6, atol=0)
        else:
            assert torch.equal(weight.values, expected[layer]), layer


@each_variant
@pytest.mark.parametrize("name", FOLDERS)
def test_native_products_match_the_numbers(name: str, variant: str) -> None:
    """From 1 to 70 rows, by several code paths; each the same bits as alone."""
    library = NativeLibrary(load_library(variant), torch.float32, 2)
    for weight in read_layers(name).values():
        outputs, inputs = weight.values.shape
        if isinstance(weight, Dense) or inputs % LANES:
            continue
        packed = library.pack_codes(weight.as_codes)
        operators = [Operator(kind=Kind.NARROW, source=0, out=1, size=inputs)]
        if weight.order is not None:
            operators.append(
                Operator(kind=Kind.ORDER, source=1, out=2, size=inputs, order=weight.order)
            )
        source = len(operators)
        operators.append(
            Operator(kind=Kind.LINEAR, source=source, out=3, size=inputs, weight=packed)
        )
        buffers = [Buffer(size, torch.float32) for size in (inputs, inputs, inputs, outputs)]
        program = NativeProgram(library, operators, buffers, 1, 3)
        x = torch.randn(70, inputs, generator=torch.Generator().manual_seed(1))
        wanted = x.double() @ weight.values.double().T
        alone = torch.cat([program.run([row]) for row in x.split(1)])
        slack = float(wanted.abs().max()) * 1e-6
        assert torch.allclose(alone.double(), wanted, rtol=1e-5, atol=slack)
        for num_rows in (2, 5, 13, 40, 70):
            assert torch.equal(program.run([x[:num_rows]]), alone[:num_rows]), num_rows


def test_unreadable_schemes_are_refused_with_the_readable_ones() -> None:
    for config, text in (
        (
            {"quant_method": "hqq"},
            "quant_method 'hqq' is not supported; supported are awq, bitsand",
        ),
        ({"bits": 4}, "quant_method None is not supported"),
        ({"quant_method": "gptq", "bits": 3}, r"gptq: bits 3 is not supported; .* \[4, 2, 8\]"),
        ({"quant_method": "awq", "version": "gemv"}, "awq: version 'gemv' is not supported"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "compressed-tensors: format 'marlin-24' is not supported",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"a": 1}},
            "transform_config is not supported",
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_AWQ"}},
            r"modelopt: quant_algo 'W4A16_AWQ' is not supported; supported are \['FP8'",
        ),
        ({"quant_method": "modelopt"}, "modelopt: quant_algo None is not supported"),
        (
            {"quant_method": "modelopt", "quantization": "FP8"},
            "modelopt: quantization 'FP8' is not a JSON object",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "quantized_layers": ["a"]},
            r"modelopt: quantized_layers \['a'\] is not a JSON object",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "quantized_layers": {"a": "FP8"}},
            "modelopt: quantized_layers: a: 'FP8' is not a JSON object",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4_SVD"}},
            },
            "modelopt: quant_algo 'NVFP4_SVD' is not supported",
        ),
        (
            {"quant_method": "quark", "export": {"weight_format": "fake_quantized"}},
            "quark: weight_format 'fake_quantized' is not supported",
        ),
        (
            quark(layer_quant_config={"*.mlp.*": {"weight": {**MXFP4, "dtype": "int4"}}}),
            r"quark: weight \('int4', 'per_group'\) is not supported; supported are",
        ),
        (
            quark(layer_quant_config={"*.mlp.*": {"weight": {**MXFP4, "group_size": 16}}}),
            r"quark: group_size 16 is not supported; supported are \[32\]",
        ),
        (
            quark(global_quant_config={"weight": [MXFP4, {"dtype": "int4"}]}),
            r"quark: weight \[.*'int4'.*\] is not supported",
        ),
        (quark(export=None), "quark: export None is not a JSON object"),
        (quark(global_quant_config="fp8"), "quark: global_quant_config 'fp8' is not a JSON"),
        (
            quark(layer_quant_config={"*.mlp.*": None}),
            r"quark: layer_quant_config: \*\.mlp\.\*: None is not a JSON object",
        ),
        (
            quark(kv_cache_quant_config={"*k_proj": "fp8"}),
            r"quark: kv_cache_quant_config: \*k_proj: 'fp8' is not a JSON object",
        ),
        (quark(algo_config=["rotation"]), "quark: algo_config: 'rotation' is not a JSON object"),
        (
            quark(algo_config=[AWQ, {**ROTATION, "online_r1_rotation": True}]),
            r"quark: algo_config: rotation: online rotations \(online_r1_rotation\) are not",
        ),
        (quark(algo_config={**ROTATION, "r4": True}), r"rotation: online rotations \(r4\)"),
        (
            quark(algo_config=[{**ROTATION, "online_config": {"online_rotation_layers": ["a"]}}]),
            r"rotation: online rotations \(online_config\)",
        ),
        (quark(algo_config=[{"name": "quarot"}]), r"quarot: online rotations \(r3\)"),
    ):
        with pytest.raises(ConfigError, match=text):
            find_scheme(config)


def test_quarks_algorithms_that_are_parts_of_the_weights_are_read() -> None:
    every = [AWQ, {"name": "gptq"}, {"name": "smooth"}, ROTATION]
    for algorithms in (None, [], AWQ, every):
        assert str(find_scheme(quark(algo_config=algorithms))) == "quark"


def test_modelopt_names_the_type_of_the_kv_cache_in_either_file() -> None:
    method = {"quant_method": "modelopt"}
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    for found, expected in (
        ({"quant_algo": "FP8"}, "none"),
        ({"quant_algo": "FP8", "kv_cache_scheme": scheme}, "fp8"),
        ({"quantization": {"quant_algo": "fp8_pb_wo", "kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}}, "none"),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, "fp8"),
    ):
        assert find_scheme(method | found).cache_dtype() == expected
    other = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}}
    with pytest.raises(ConfigError, match=r"kv-cache-dtype: auto: .* 'NVFP4'; supported is 'FP8'"):
        find_scheme(method | other).cache_dtype()


def test_quark_names_the_type_of_the_kv_cache() -> None:
    for dtype, expected in (("fp8_e4m3", "fp8"), ("int8", "int8")):
        layers = {"*k_proj": {"output_tensors": {"dtype": dtype}, "weight": None}}
        assert find_scheme(quark(kv_cache_quant_config=layers)).cache_dtype() == expected
    assert find_scheme(quark(kv_cache_quant_config={})).cache_dtype() == "none"
    other = {"*k_proj": {"output_tensors": {"dtype": "fp4"}}}
    with pytest.raises(ConfigError, match=r"kv-cache-dtype: auto: .* dtype 'fp4'; supported are"):
        find_scheme(quark(kv_cache_quant_config=other)).cache_dtype()


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("gptq-int4-group128", {"scales": None}, r"lacks .*k_proj\.scales"),
        (
            "gptq-int4-group128",
            {"scales": torch.ones(3, 32)},
            r"k_proj: scales \[32, 3\] for 8 outputs",
        ),
        ("fp8-block", {"weight_scale_inv": torch.ones(1, 1)}, r"scales \[1, 1\] for blocks of"),
        ("fp8-tensor", {"weight_scale": torch.ones(3)}, r"scales \[3\] for \d+ outputs"),
        ("modelopt-nvfp4", {"weight_scale_2": None}, r"lacks .*_proj\.weight_scale_2"),
        (
            "modelopt-nvfp4",
            {"weight_scale": torch.ones(12, 7)},
            r"scales \[12, 7\] for \d+ outputs with 8 groups",
        ),
        (
            "modelopt-mxfp8",
            {"weight_scale": torch.ones(12, 3, dtype=torch.uint8)},
            r"scales \[12, 3\] for blocks of \[1, 32\]",
        ),
        (
            "modelopt-fp8-tensor",
            {"weight": torch.ones(12, 128, dtype=torch.int8)},
            r"codes are torch.int8; only torch.float8_e4m3fn",
        ),
        (
            "compressed-tensors-int4-group128",
            {"weight_scale": torch.ones(32, 5)},
            r"5 scales for 256 inputs, with group_size \[128\]",
        ),
        (
            "gptq-int4-group128",
            {"qweight": torch.zeros(4, 8, dtype=torch.int32)},
            r"layer \S+: The size of tensor .* \(qweight torch.int32 \[4, 8\], ",
        ),
        (
            "awq-int4-group128",
            {"qweight": torch.zeros(256, 2)},
            r"layer \S+: .*rshift.* \(.*qweight torch.float32 \[256, 2\]",
        ),
        (
            "compressed-tensors-int4-group128",
            {"weight_packed": torch.zeros(384, dtype=torch.int32)},
            r"layer \S+: tuple index .*weight_packed torch.int32 \[384\]",
        ),
        (
            "bitsandbytes-nf4",
            {"weight.quant_state.bitsandbytes__nf4": None},
            "lacks .*weight.quant_state.bitsandbytes__nf4",
        ),
        (
            "bitsandbytes-nf4",
            {"weight.quant_map": torch.ones(8)},
            "quant_map has 8 values, not 16",
        ),
        (
            "bitsandbytes-nf4-double",
            {"weight.quant_state.bitsandbytes__nf4": as_bytes(shape=[136, 128], blocksize=64)},
            "nested_absmax without a nested_blocksize",
        ),
        (
            "bitsandbytes-nf4",
            {"weight.quant_state.bitsandbytes__nf4": as_bytes(shape=[12, 128], blocksize=0)},
            r"Expected `int` >= 1 - at `\$.blocksize`",
        ),
    ],
)
def test_tensors_that_do_not_go_together_are_refused_with_the_layers_name(
    name: str, change: dict[str, torch.Tensor | None], text: str, tmp_path: Path
) -> None:
    tensors = load_file(GOLDEN / name / "model.safetensors")
    layer = next(iter(load_file(GOLDEN / name / "expected.safetensors"))).removesuffix(".weight")
    for suffix, tensor in change.items():
        del tensors[f"{layer}.{suffix}"]
        if tensor is not None:
            tensors[f"{layer}.{suffix}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint([tmp_path / "model.safetensors"])
    stored = find_layer(checkpoint, f"{layer}.weight", find_scheme(config_of(name)))
    assert isinstance(stored, StoredCodes)
    with pytest.raises(ConfigError, match=text):
        stored.read(torch.float32)
