"""The products of a layer for few tokens, with what is fused into them, beside torch.mm alone."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.rows import Case, num_copies
from benchmarks.gpu.suite import Suite
from benchmarks.gpu.timing import Run
from kernels.linear import gated, linear
from kernels.rms_norm import Norm

EPS = 1e-6


class Product(NamedTuple):
    name: str
    num_rows: int  # of the weight
    size: int
    is_normed: bool = False
    is_gated: bool = False
    is_added: bool = False  # to the residual
    is_wide: bool = False  # in float32


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


def case(suite: Suite, product: Product, num_tokens: int) -> Case:
    num_bytes = product.num_rows * product.size * suite.dtype.itemsize
    shape = f"{product.name}, {num_tokens} tokens"
    make = partial(_runs, suite, product, num_tokens, num_copies(suite, num_bytes))
    return Case("gated" if product.is_gated else "linear", shape, make, num_bytes, peer="torch.mm")


def _runs(
    suite: Suite, product: Product, num_tokens: int, copies: int
) -> tuple[list[Run], list[Run]]:
    def random(*shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=suite.dtype, device=suite.device).normal_(0, std)

    x = random(num_tokens, product.size)
    norm = Norm(random(product.size), EPS) if product.is_normed else None
    residual = random(num_tokens, product.num_rows) if product.is_added else None
    weights = [random(product.num_rows, product.size, std=0.02) for _ in range(copies)]
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
    return ours, [partial(torch.mm, x, weight.t()) for weight in weights]
