"""Writes the golden files beside it: small layers quantised and packed by each format's own tools,
and the weights which those tools read back from them.

No test runs this. Each part needs packages that are not dependencies of Shoal; README.md, beside
this file, says which, and which folder each part writes:

    python tests/services/worker/golden/make.py PART...
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
ATTENTION = "model.layers.0.self_attn"
SHAPES = {"q_proj": (20, 256), "k_proj": (12, 256)}

Shapes = Mapping[str, tuple[int, int]]


def make_model(shapes: Shapes, dtype: torch.dtype) -> nn.Module:
    """The linear layers of ``shapes`` where a decoder has those of its attention."""
    generator = torch.Generator().manual_seed(0)
    attention = nn.Module()
    for name, (num_outputs, num_inputs) in shapes.items():
        linear = nn.Linear(num_inputs, num_outputs, bias=False, dtype=dtype)
        sizes = torch.exp(torch.randn(num_outputs, 1, generator=generator) / 2)
        weight = torch.randn(num_outputs, num_inputs, generator=generator) * sizes * 0.02
        linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        attention.add_module(name, linear)
    model = attention
    for name in reversed(ATTENTION.split(".")):
        parent = nn.Module()
        parent.add_module(name, model)
        model = parent
    return model


def linears_of(model: nn.Module, shapes: Shapes) -> dict[str, Any]:
    return {f"{ATTENTION}.{name}": model.get_submodule(f"{ATTENTION}.{name}") for name in shapes}


def save(
    folder: str,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    quantization_config: Mapping[str, Any] | None = None,
) -> None:
    """Without ``quantization_config`` the tool has written the file of it already."""
    place = HERE / folder
    place.mkdir(exist_ok=True)
    assert all(weight.dtype == torch.float32 for weight in expected.values())
    metadata = {"format": "pt"}
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, place / "model.safetensors", metadata
    )
    weights = {f"{name}.weight": weight.contiguous() for name, weight in expected.items()}
    save_file(weights, place / "expected.safetensors")
    if quantization_config is not None:
        text = json.dumps({"quantization_config": quantization_config}, indent=2, sort_keys=True)
        (place / "config.json").write_text(text + "\n")


def check_near(expected: Tensor, official: Tensor) -> None:
    """``official`` was computed in its own type, narrower than float32."""
    rounding = torch.finfo(official.dtype).eps
    torch.testing.assert_close(expected, official.float(), rtol=2 * rounding, atol=0)


def compressed_tensors() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    def preset(name: str) -> QuantizationScheme:
        return preset_name_to_scheme(name, ["Linear"])

    def weight_only(**weights: Any) -> QuantizationScheme:
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))

    blocks = {"q_proj": (136, 40), "k_proj": (8, 168)}
    short = {"q_proj": (20, 128), "k_proj": (12, 128)}
    asymmetric = weight_only(num_bits=4, group_size=32, strategy="group", symmetric=False)
    compress("compressed-tensors-int4-group128", preset("W4A16"))
    compress("compressed-tensors-int4-group32-asymmetric", asymmetric, short)
    compress("compressed-tensors-int4-channel", weight_only(num_bits=4, strategy="channel"), short)
    compress("compressed-tensors-int8-group128", preset("W8A16"))
    compress("compressed-tensors-int8-channel", weight_only(num_bits=8, strategy="channel"), short)
    compress("compressed-tensors-int8-activations", preset("W8A8"), short)
    compress("compressed-tensors-fp8-tensor", preset("FP8"), short)
    compress("compressed-tensors-fp8-channel", preset("FP8_DYNAMIC"), short)
    compress("compressed-tensors-fp8-block", preset("FP8_BLOCK"), blocks)
    compress("compressed-tensors-mxfp4", preset("MXFP4A16"), short)
    compress("compressed-tensors-nvfp4", preset("NVFP4A16"), short)


def compressed_tensors_g_idx() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    ordered = QuantizationArgs(num_bits=4, group_size=64, strategy="group", actorder="group")
    scheme = QuantizationScheme(targets=["Linear"], weights=ordered)
    compress("compressed-tensors-int4-group64-g-idx", scheme)


def compress(folder: str, scheme: Any, shapes: Shapes = SHAPES) -> None:
    from compressed_tensors.compressors import BaseCompressor, ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = make_model(shapes, torch.bfloat16)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config, show_progress=False)
    for number, linear in enumerate(linears_of(model, shapes).values()):
        calibrate(linear, 0.02 + 0.01 * number)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    expected = {}
    for name, linear in linears_of(model, shapes).items():
        tensors = linear.state_dict()
        chosen = linear.quantization_scheme
        expected[name] = decompress(tensors, chosen)
        reader = BaseCompressor.get_value_from_registry(chosen.format)
        check_near(expected[name], reader.decompress(tensors, chosen)["weight"])
    save(folder, model.state_dict(), expected)
    compressor.update_config(str(HERE / folder))


def calibrate(linear: Any, input_scale: float) -> None:
    """Sets scales and zero points for the weight as it is."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = linear.quantization_scheme.weights
    weight = linear.weight
    if hasattr(linear, "weight_g_idx"):
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        groups = order // args.group_size
        linear.weight_g_idx.data.copy_(groups)
        weight = weight[:, groups.argsort(stable=True)]
    smallest, largest = ranges_of(weight, args)
    global_scale = None
    if hasattr(linear, "weight_global_scale"):
        global_scale = generate_gparam(smallest.min(), largest.max())
        linear.weight_global_scale.data.copy_(global_scale)
    scale, zero_point = calculate_qparams(smallest, largest, args, global_scale)
    linear.weight_scale.data.copy_(scale)
    linear.weight_zero_point.data.copy_(zero_point)
    if hasattr(linear, "input_scale"):
        linear.input_scale.data.fill_(input_scale)


def ranges_of(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Smallest and largest weight that have one scale, in the shape of the scales."""
    from compressed_tensors.quantization.utils import maybe_pad_tensor_for_block_quant

    match args.strategy:
        case "tensor":
            return weight.min().reshape(1), weight.max().reshape(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            height, width = args.block_structure
            padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure)
            blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
            return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(2), groups.amax(2)


def decompress(tensors: Mapping[str, Tensor], scheme: Any) -> Tensor:
    """In float32, as the compressors do it in the type of their scales."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    reader = BaseCompressor.get_value_from_registry(scheme.format)
    if "fp4" not in scheme.format:
        scale = tensors["weight_scale"].float()
        return reader.decompress({**tensors, "weight_scale": scale}, scheme)["weight"]
    packed = tensors["weight_packed"]
    codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
    scale = reader._decompress_scale(tensors["weight_scale"], torch.float32)
    return dequantize(
        codes, scale, args=scheme.weights, global_scale=tensors.get("weight_global_scale")
    )


PARTS: dict[str, Callable[[], None]] = {
    "compressed-tensors": compressed_tensors,
    "compressed-tensors-g-idx": compressed_tensors_g_idx,
}

if __name__ == "__main__":
    for part in sys.argv[1:]:
        PARTS[part]()
