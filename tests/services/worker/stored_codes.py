"""Checkpoints quantized like by known tools, from dense ones, with the nearest codes.

``test_schemes.py`` checks the tools' tensor layouts; these are whole models.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.harness.engines import NotInstalled
from services.worker.models.registry import SIDE_FILES
from services.worker.weights.codes import E2M1, NF4
from services.worker.weights.schemes import SCHEMES
from shared.model_folder import weight_files
from tests.services.worker.checkpoints import change_config

GROUP, NVFP4_GROUP = 32, 16
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output at each place of a word


class Layout(NamedTuple):
    """``write`` makes a layer's tensors by suffix from its weight [outputs, inputs], and the
    dequantized weight. ``config`` is in config.json, or in a ``side_file``. The file's metadata
    have what is ``told`` of each weight."""

    config: dict[str, Any]
    write: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
    side_file: str | None = None
    told: dict[str, Any] | None = None


def check_method(name: str) -> None:
    if name not in SCHEMES:
        raise NotInstalled(f"the format {name}")


def save_quantized(
    dense: Path, folder: Path, layout: Layout, ends: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """A copy of ``dense`` in ``folder`` with quantized projections, and other tensors with
    ``ends``. Returns all dequantized tensors by the names of ``dense``."""
    check_method(SIDE_FILES.get(layout.side_file or "") or layout.config["quant_method"])
    files = weight_files(dense)
    tensors = {name: each for file in files for name, each in load_file(file).items()}
    skipped = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(dense, folder, ignore=skipped, dirs_exist_ok=True)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("weight") and name.removesuffix(".weight").endswith(("_proj", *ends)):
            written, values[name] = layout.write(tensor.float())
            layer = name.removesuffix("weight")
            stored |= {layer + suffix: each.contiguous() for suffix, each in written.items()}
        else:
            stored[name] = values[name] = tensor
    told = {name: json.dumps(layout.told) for name in values} if layout.told else None
    save_file(stored, folder / "model.safetensors", told)
    if layout.side_file is None:
        change_config(folder, quantization_config=layout.config)
    else:
        (folder / layout.side_file).write_text(json.dumps(layout.config))
    return values


def save_mxfp4_experts(dense: Path, folder: Path) -> None:
    """The same for a gpt-oss, with only its experts quantized."""
    check_method("mxfp4")
    tensors = {name: each for file in weight_files(dense) for name, each in load_file(file).items()}
    skipped = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(dense, folder, ignore=skipped, dirs_exist_ok=True)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        groups = tensors.pop(name).float().mT.unflatten(2, (-1, GROUP))
        exponents = (groups.abs().amax(3) / 4).log2().floor()
        scaled = (groups / exponents.exp2()[..., None])[..., None]
        codes = (scaled - E2M1).abs().argmin(4).to(torch.uint8)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, quantization_config={"quant_method": "mxfp4"})


def words(codes: Tensor) -> Tensor:
    """codes [..., n] below 16 → [..., n / 8] int32, the first one in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    packed = (codes.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def in_groups(weight: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes 0 … 15 [outputs, inputs], scales and zeros [outputs, groups], and the dequantized
    weight. Groups have consecutive inputs, or inputs in ``order``."""
    order = torch.arange(weight.shape[1]) if order is None else order
    groups = weight[:, order].unflatten(1, (-1, GROUP))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round()
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    values = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
    back = order.argsort()
    return codes.flatten(1)[:, back], scales, zeros, values[:, back]


def write_gptq(weight: Tensor, *, is_ordered: bool) -> tuple[dict[str, Tensor], Tensor]:
    inputs = weight.shape[1]
    generator = torch.Generator().manual_seed(inputs)  # equal for layers with the same input
    order = torch.randperm(inputs, generator=generator) if is_ordered else torch.arange(inputs)
    codes, scales, zeros, values = in_groups(weight, order)
    tensors = {
        "qweight": words(codes).T,
        "qzeros": words(zeros.T),
        "scales": scales.T.half(),
        "g_idx": (order.argsort() // GROUP).int(),
    }
    return tensors, values


def write_awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, values = in_groups(weight)

    def packed(numbers: Tensor) -> Tensor:
        return words(numbers.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1))

    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.T.half()}, values


def write_compressed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, values = in_groups(weight)
    tensors = {
        "weight_packed": words(codes),
        "weight_scale": scales,
        "weight_zero_point": words(zeros.T).T,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, values


def write_fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """In blocks of GROUP · GROUP."""
    blocks = weight.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scales = blocks.abs().amax((1, 3)) / 448
    each = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    codes = (weight / each).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * each


def write_mxfp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    exponents = (groups.abs().amax(2, keepdim=True) / 448).log2().ceil()
    codes = (groups / exponents.exp2()).to(torch.float8_e4m3fn)
    tensors = {
        "weight": codes.flatten(1),
        "weight_scale_inv": (exponents + 127).to(torch.uint8).squeeze(2),
    }
    return tensors, (codes.float() * exponents.exp2()).flatten(1)


def write_nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = weight.unflatten(1, (-1, NVFP4_GROUP))
    factor = weight.abs().amax() / 6 / 448
    scales = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
    each = (scales.float() * factor)[..., None]
    codes = ((groups / each)[..., None] - E2M1).abs().argmin(3).to(torch.uint8)
    pairs = codes.flatten(1)
    tensors = {
        "weight": pairs[:, ::2] | pairs[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(0.02),
    }
    return tensors, (E2M1[codes.int()] * each).flatten(1)


def write_nf4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    blocks = weight.view(-1, GROUP)
    scales = blocks.abs().amax(1)
    codes = (blocks / scales[:, None])[..., None].sub(NF4).abs().argmin(2)
    pairs = codes.view(-1, 2).to(torch.uint8)
    state = json.dumps({"shape": [*weight.shape], "blocksize": GROUP, "quant_type": "nf4"})
    tensors = {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]),
        "weight.absmax": scales,
        "weight.quant_map": NF4.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor([*state.encode()], dtype=torch.uint8),
    }
    return tensors, (NF4[codes] * scales[:, None]).view(weight.shape)


def write_torchao(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, values = in_groups(weight)
    tensors = {
        "_weight_qdata": (codes - 8).to(torch.int8),
        "_weight_scale": scales,
        "_weight_zero_point": (zeros - 8).to(torch.int8),
    }
    return tensors, values


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"}
LAYOUTS = {
    "gptq": Layout(GPTQ, lambda weight: write_gptq(weight, is_ordered=False)),
    "gptq, desc_act": Layout(
        GPTQ | {"desc_act": True}, lambda weight: write_gptq(weight, is_ordered=True)
    ),
    "awq": Layout(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, write_awq
    ),
    "compressed-tensors": Layout(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}},
        },
        write_compressed,
    ),
    "fp8": Layout({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, write_fp8),
    "bitsandbytes": Layout({"quant_method": "bitsandbytes", "load_in_4bit": True}, write_nf4),
}
MODELOPT = Layout(
    {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": NVFP4_GROUP,
            "exclude_modules": ["lm_head"],
        },
    },
    write_nvfp4,
    "hf_quant_config.json",
)
MXFP8 = Layout(
    {"quant_method": "mxfp8", "weight_block_size": [1, GROUP], "scale_fmt": "ue8m0"}, write_mxfp8
)
OLD_GPTQ = Layout(
    {"bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq_v2"},
    LAYOUTS["gptq"].write,
    "quantize_config.json",
)
OLD_AWQ = Layout(
    {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"},
    write_awq,
    "quant_config.json",
)
TORCHAO = Layout(
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig"}}},
    write_torchao,
    told={"_type": "IntxUnpackedToInt8Tensor", "_data": {}},
)
MORE_LAYOUTS = {
    "torchao": TORCHAO,
    "modelopt": MODELOPT,
    "mxfp8": MXFP8,
    "gptq, next to the config": OLD_GPTQ,
    "awq, next to the config": OLD_AWQ,
}


def save_made_for_codes(dense: Path, folder: Path, kind: str = "float", bits: int = 8) -> None:
    """A quantized copy of ``dense`` calibrated for a quantized KV cache: each layer has a scale of
    all its keys and one of all its values."""
    layout = LAYOUTS["compressed-tensors"]
    values = save_quantized(dense, folder, layout)
    layers = [name.removesuffix("k_proj.weight") for name in values if "k_proj.weight" in name]
    file = folder / "model.safetensors"
    scales = {f"{layer}{name}_scale": torch.tensor([0.02]) for layer in layers for name in "kv"}
    save_file(load_file(file) | scales, file)
    scheme = {"num_bits": bits, "type": kind, "strategy": "tensor", "dynamic": False}
    change_config(folder, quantization_config=layout.config | {"kv_cache_scheme": scheme})
