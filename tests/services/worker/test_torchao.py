"""Weights of torchao are read as its classes dequantize them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.layers.weights import Quantized, Weight
from services.worker.weights.checkpoint import open_checkpoint
from services.worker.weights.load import find_layer
from services.worker.weights.schemes import find_scheme
from services.worker.weights.schemes.scheme import StoredCodes
from shared.errors import ConfigError

LAYER, GROUP = "model.layers.0.mlp.up_proj", 32
CONFIG = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}
RNG = torch.Generator().manual_seed(0)


class Part(NamedTuple):
    kind: str
    tensors: dict[str, Tensor]
    values: Tensor
    attributes: dict[str, Any]


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=RNG, dtype=torch.int8)


def scales(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=RNG).add(0.1).bfloat16()


def eight_bits(num_groups: int) -> Part:
    codes, by = integers(-128, 127, 24, 128), scales(24, num_groups).float()
    each = by.repeat_interleave(128 // num_groups, 1)
    tensors = {"qdata": codes, "scale": by, "zero_point": torch.zeros_like(by, dtype=torch.int8)}
    return Part("Int8Tensor", tensors, codes * each, {})


def unpacked(low: int, high: int) -> Part:
    """Codes of fewer bits in a byte each, with zero points."""
    codes, by, zeros = integers(low, high, 24, 128), scales(24, 4), integers(low, high, 24, 4)
    each, zero = (part.float().repeat_interleave(GROUP, 1) for part in (by, zeros))
    attributes = {"target_dtype": {"_type": "torch.dtype", "_data": f"int{high.bit_length() + 1}"}}
    tensors = {"qdata": codes, "scale": by, "zero_point": zeros}
    return Part("IntxUnpackedToInt8Tensor", tensors, (codes - zero) * each, attributes)


def float8(num_rows: int, num_columns: int) -> Part:
    codes = torch.randn(24, 128, generator=RNG).to(torch.float8_e4m3fn)
    by = scales(num_rows, num_columns).float()
    each = by.repeat_interleave(24 // num_rows, 0).repeat_interleave(128 // num_columns, 1)
    return Part("Float8Tensor", {"qdata": codes, "scale": by}, codes.float() * each, {})


def four_bits() -> Part:
    codes, by, offsets = integers(-8, 7, 24, 128), scales(24, 4), scales(24, 4) - 0.5
    each, offset = (part.float().repeat_interleave(GROUP, 1) for part in (by, offsets))
    packed = codes[:, ::2] & 15 | codes[:, 1::2] << 4
    tensors = {"qdata": packed, "scale": by.T, "zero_point": offsets.T}
    return Part("Int4Tensor", tensors, codes * each + offset, {"shape": [24, 128]})


def tiles() -> Part:
    """Packed as the matrix operand of tensor cores of 16 × 8 × 16, one word after the other."""
    codes, by, offsets = integers(0, 15, 24, 256), scales(24, 8), scales(24, 8) - 0.5
    each, offset = (part.float().repeat_interleave(GROUP, 1) for part in (by, offsets))
    packed = torch.empty(3, 2, 32, 4, dtype=torch.int64)
    for tile, part, thread, word in torch.cartesian_prod(*map(torch.arange, packed.shape)).tolist():
        row, first = codes[8 * tile + thread // 4], 128 * part + 32 * word + 2 * (thread % 4)
        pairs = [row[at : at + 2].tolist() for at in range(first, first + 32, 8)]
        nibbles = [even for even, _ in pairs] + [odd for _, odd in pairs]
        whole = sum(code << 4 * place for place, code in enumerate(nibbles))
        packed[tile, part, thread, word] = whole - (whole >> 31 << 32)
    tensors = {"qdata": packed.int(), "scale_and_zero": torch.stack((by.T, offsets.T), 2)}
    values = (codes - 8) * each + offset
    return Part("Int4TilePackedTo4dTensor", tensors, values, {"shape": [24, 256]})


PARTS = {
    "int8, a scale for each output": eight_bits(1),
    "int8 in groups": eight_bits(2),
    "int4 in bytes": unpacked(-8, 7),
    "int6 in bytes": unpacked(-32, 31),
    "fp8, one scale": float8(1, 1),
    "fp8, a scale for each output": float8(24, 1),
    "fp8 in blocks": float8(3, 2),
    "int4 in pairs": four_bits(),
    "int4 in tiles": tiles(),
}


def stored(part: Part, folder: Path) -> StoredCodes:
    tensors = {f"{LAYER}._weight_{name}": each.contiguous() for name, each in part.tensors.items()}
    described = json.dumps({"_type": part.kind, "_data": part.attributes})
    save_file(tensors, folder / "model.safetensors", {f"{LAYER}.weight": described})
    checkpoint = open_checkpoint([folder / "model.safetensors"])
    found = find_layer(checkpoint, f"{LAYER}.weight", find_scheme(CONFIG))
    assert isinstance(found, StoredCodes)
    return found


def read(part: Part, folder: Path) -> Weight:
    found = stored(part, folder)
    assert found.shape == list(part.values.shape)
    return found.read(torch.float32)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_values_match_torchao(part: Part, tmp_path: Path) -> None:
    weight = read(part, tmp_path)
    assert isinstance(weight, Quantized)
    if not part.kind.startswith("Int4"):
        assert torch.equal(weight.values, part.values)
        return
    # Offsets become zeros, which are rounded.
    limit = float(part.values.abs().max()) * 2**-22
    torch.testing.assert_close(weight.values, part.values, rtol=0, atol=limit)


@pytest.mark.parametrize("name", ["int4 in bytes", "int6 in bytes"])
def test_plans_count_four_bits(name: str, tmp_path: Path) -> None:
    part = PARTS[name]
    layer = stored(part, tmp_path)
    num_bytes = layer.scheme.num_bytes(layer.tensors.values(), torch.bfloat16)
    codes = part.tensors["qdata"].numel() // (2 if "int4" in name else 1)
    assert num_bytes == codes + 24 * 4 * (2 + 1)
    weight = layer.read(torch.bfloat16)
    assert isinstance(weight, Quantized)
    assert weight.codes.nbytes == codes


INT8, TILES = PARTS["int8 in groups"], PARTS["int4 in tiles"]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (INT8._replace(kind="MXTensor"), "MXTensor is not supported; .*'Int4Tensor'"),
        (
            TILES._replace(attributes={"shape": [20, 250]}),
            r"Int4TilePackedTo4dTensor \[20, 250\] is filled up to \[24, 256\]",
        ),
        (INT8._replace(tensors=INT8.tensors | {"act_pre_scale": scales(128)}), "act_pre_scale, a"),
        (
            INT8._replace(tensors=INT8.tensors | {"scale": scales(24, 3)}),
            r"scales \[24, 3\] for blocks of \[1, 42\]",
        ),
    ],
)
def test_unreadable_weights_are_refused_by_name(part: Part, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"layer {LAYER}: {text}"):
        read(part, tmp_path)


def test_files_without_metadata_are_refused(tmp_path: Path) -> None:
    layer = stored(INT8, tmp_path)
    save_file(load_file(layer.file), layer.file)
    with pytest.raises(ConfigError, match=f"no metadata of torchao describe {LAYER}.weight"):
        _ = layer.shape
