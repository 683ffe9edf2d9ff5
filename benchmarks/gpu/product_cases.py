"""A layer's GEMMs for few tokens, with their fused operators, compared with torch.mm alone; then
quantized weights compared with torch.mm on dense ones."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.rows import Case, num_copies
from benchmarks.gpu.suite import Suite
from benchmarks.gpu.timing import Run
from kernels.codes import Codes
from kernels.linear import gated, linear
from kernels.rms_norm import Norm
from services.worker.weights.online import ONLINE, Quantization

EPS = 1e-6
FORMS: tuple[Quantization, ...] = ("wint8", "wint4", "nf4", "fp8")
QUANTISED_ROWS = 64  # the other rows are copies


class Product(NamedTuple):
    name: str
    num_rows: int  # rows of the weight
    size: int
    is_normed: bool = False
    is_gated: bool = False
    is_added: bool = False  # adds to the residual
    is_wide: bool = False  # float32 output


def products(suite: Suite) -> list[Product]:
    config = suite.model
    hidden, size, head_dim = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    num_all = num_heads + 2 * num_kv_heads
    return [
        Product("qkv", num_all * head_dim, hidden, is_normed=True),
        Product("o", hidden, num_heads * head_dim, is_added=True),
        Product("gate_up", 2 * size, hidden, is_normed=True, is_gated=True),
        Product("down", hidden, size, is_added=True),
        Product("lm_head", config["vocab_size"], hidden, is_normed=True, is_wide=True),
    ]


def cases(suite: Suite) -> Iterator[Case]:
    for num_tokens in suite.nums_tokens:
        for product in products(suite):
            yield case(suite, product, num_tokens)


def codes_cases(suite: Suite) -> Iterator[Case]:
    """Quantized layers; heads stay dense."""
    for num_tokens in sorted({suite.nums_tokens[0], suite.nums_tokens[-1]}):
        for product in products(suite)[:-1]:
            for form in FORMS:
                yield codes_case(suite, product, form, num_tokens)


def codes_case(suite: Suite, product: Product, form: Quantization, num_tokens: int) -> Case:
    few = _codes(suite, form, QUANTISED_ROWS, product.size)
    num_bytes = (few.codes.nbytes + few.scales.nbytes) * product.num_rows // QUANTISED_ROWS
    shape = f"{product.name}, {num_tokens} tokens"
    make = partial(_runs_of_codes, suite, product, form, num_tokens, num_copies(suite, num_bytes))
    operator = "gated" if product.is_gated else "linear"
    return Case(f"{operator}, {form}", shape, make, num_bytes, peer="torch.mm")


def _codes(suite: Suite, form: Quantization, num_rows: int, size: int) -> Codes:
    dense = torch.empty(QUANTISED_ROWS, size, dtype=suite.dtype, device=suite.device)
    codes = ONLINE[form](dense.normal_(0, 0.02)).as_codes
    num = -(-num_rows // QUANTISED_ROWS)
    rows, scales = (each.repeat(num, 1)[:num_rows] for each in (codes.codes, codes.scales))
    return codes._replace(codes=rows, scales=scales)


def _runs_of_codes(
    suite: Suite, product: Product, form: Quantization, num_tokens: int, copies: int
) -> tuple[list[Run], list[Run]]:
    """Fewer copies of torch's dense weights than of ours, which are small."""
    dense_bytes = product.num_rows * product.size * suite.dtype.itemsize
    _, theirs = _runs(suite, product, num_tokens, num_copies(suite, dense_bytes))
    weights = [_codes(suite, form, product.num_rows, product.size) for _ in range(copies)]
    return _ours(suite, product, num_tokens, weights), theirs


def case(suite: Suite, product: Product, num_tokens: int) -> Case:
    num_bytes = product.num_rows * product.size * suite.dtype.itemsize
    shape = f"{product.name}, {num_tokens} tokens"
    make = partial(_runs, suite, product, num_tokens, num_copies(suite, num_bytes))
    return Case("gated" if product.is_gated else "linear", shape, make, num_bytes, peer="torch.mm")


def _runs(
    suite: Suite, product: Product, num_tokens: int, copies: int
) -> tuple[list[Run], list[Run]]:
    x = _random(suite, num_tokens, product.size)
    shape = product.num_rows, product.size
    weights = [_random(suite, *shape, std=0.02) for _ in range(copies)]
    ours = _ours(suite, product, num_tokens, weights)
    return ours, [partial(torch.mm, x, weight.t()) for weight in weights]


def _ours(
    suite: Suite, product: Product, num_tokens: int, weights: Sequence[Tensor | Codes]
) -> list[Run]:
    x = _random(suite, num_tokens, product.size)
    norm = Norm(_random(suite, product.size), EPS) if product.is_normed else None
    residual = _random(suite, num_tokens, product.num_rows) if product.is_added else None
    ours: list[Run] = []
    for weight in weights:
        if product.is_gated:
            assert norm is not None
            ours.append(partial(gated, x, weight, norm=norm))
        else:
            out_dtype = torch.float32 if product.is_wide else None
            ours.append(
                partial(linear, x, weight, norm=norm, residual=residual, out_dtype=out_dtype)
            )
    return ours


def _random(suite: Suite, *shape: int, std: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=suite.dtype, device=suite.device).normal_(0, std)
