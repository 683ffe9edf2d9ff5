"""On a GPU a token's result has the same bits in every batch."""

import pytest
import torch

from kernels.linear import FEW_TOKENS
from kernels.paged_attention import PLAIN, AttentionOptions
from tests.kernels import bits
from tests.kernels.attended import Heads, assert_first_tokens_do_not_matter, decoded_rows

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MAX_DECODING = 128
QWEN3_HEADS = Heads(32, 8, 128)
SMALL, DOWN, GATE_UP = (512, 264), (4096, 12288), (24576, 4096)  # one for each block size
PRODUCTS = [(kind, SMALL, torch.bfloat16) for kind in bits.KINDS]
PRODUCTS += [(kind, SMALL, torch.float32) for kind in ("all", "gated")]
PRODUCTS += [("residual", DOWN, torch.bfloat16), ("norm", DOWN, torch.bfloat16)]
PRODUCTS += [(kind, GATE_UP, torch.bfloat16) for kind in ("gated", "logits")]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.parametrize(("kind", "shape", "dtype"), PRODUCTS, ids=str)
def test_of_products(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    compute = bits.products(kind, shape, FEW_TOKENS, dtype, CUDA)
    bits.assert_rows_stand_alone(compute, FEW_TOKENS, range(1, FEW_TOKENS))


@dtypes
def test_of_norms(dtype: torch.dtype) -> None:
    compute = bits.norms(4096, FEW_TOKENS, dtype, CUDA)
    bits.assert_rows_stand_alone(compute, FEW_TOKENS, range(1, FEW_TOKENS))


@dtypes
def test_of_rotations(dtype: torch.dtype) -> None:
    compute = bits.rotations(QWEN3_HEADS, FEW_TOKENS, dtype, CUDA)
    bits.assert_rows_stand_alone(compute, FEW_TOKENS, range(1, FEW_TOKENS))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [PLAIN, AttentionOptions(window=70)], ids=["plain", "window"])
def test_of_rows_that_decode(options: AttentionOptions, width: int) -> None:
    compute = decoded_rows(QWEN3_HEADS, width, MAX_DECODING, torch.bfloat16, CUDA, options)
    bits.assert_rows_stand_alone(compute, MAX_DECODING, range(1, MAX_DECODING))


@dtypes
@pytest.mark.parametrize("window", [20, 64, 150])
def test_a_tokens_result_does_not_depend_on_the_start_of_its_row(
    window: int, dtype: torch.dtype
) -> None:
    options = AttentionOptions(window)
    assert_first_tokens_do_not_matter(QWEN3_HEADS, 3, dtype, CUDA, options)
