"""Every type has the values that the package ``gguf`` gives it."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from services.worker.gguf.codes import KINDS
from services.worker.gguf.scheme import FORMS, Gguf
from services.worker.layers.weights import Quantized
from shared.formats.gguf.file import QUANTIZED
from tests.shared.formats.gguf.writer import K_TYPES, random_blocks

ROWS, WIDTH = 24, 1024
SYMMETRIC = ("Q4_0", "Q5_0", "Q8_0", "Q6_K")
kinds = pytest.mark.parametrize("kind", QUANTIZED)


def raw(kind: str, seed: int = 0) -> np.ndarray:
    rng, type_ = np.random.default_rng(seed), GGMLQuantizationType[kind]
    if kind in K_TYPES:
        return random_blocks(rng, type_, (ROWS, WIDTH // 256))
    values = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    values[3] = 0  # scales of 0
    values[4] = 0.25
    return quantize(values, type_)


def test_all_types_are_tested() -> None:
    assert KINDS.keys() == QUANTIZED.keys() == FORMS.keys()


@kinds
def test_values_match_gguf_bit_for_bit(kind: str) -> None:
    stored = raw(kind)
    blocks = torch.from_numpy(stored).unflatten(1, (-1, QUANTIZED[kind].num_bytes))
    expected = dequantize(stored, GGMLQuantizationType[kind])
    assert np.array_equal(KINDS[kind](blocks).values().numpy(), expected)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_same_values(kind: str, dtype: torch.dtype) -> None:
    scheme = Gguf({"quant_method": "gguf"})
    stored = raw(kind, seed=1)
    weight = scheme.read({kind: torch.from_numpy(stored)}, dtype)
    expected = torch.from_numpy(dequantize(stored, GGMLQuantizationType[kind]).copy())
    if isinstance(weight, Quantized):
        num_bytes = sum(each.nbytes for each in (*weight.parameters(), *weight.buffers()))
        table_bytes = 64 if FORMS[kind].bits == 4 else 0
        assert FORMS[kind].num_bytes(ROWS * WIDTH) == num_bytes - table_bytes
    if kind in SYMMETRIC or dtype == torch.float32:
        assert torch.equal(weight.values, expected.to(dtype))
        return
    # Zeros are rounded: a value in the middle of two bfloat16 may become either.
    assert isinstance(weight, Quantized)
    found, limit = weight.as_codes.values(torch.float32), expected.abs().amax() * 2**-22
    assert (found - expected).abs().max() <= limit
    assert ((weight.values.float() - expected).abs() <= expected.abs() * 2**-8 + limit).all()
