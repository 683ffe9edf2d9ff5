"""Experts and routing, compiled for simulated GPUs."""

import re
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
import triton

from benchmarks.gpu.dry_card import HOPPER
from kernels.codes.triton import DENSE
from kernels.experts.blocks import MANY_TOKENS, VERY_MANY_TOKENS, block_of
from kernels.experts.triton.config import config
from kernels.experts.triton.place import BLOCK, place_kernel
from kernels.experts.triton.products import down_kernel, gate_up_kernel
from kernels.experts.triton.sums import BLOCK as SUM_BLOCK
from kernels.experts.triton.sums import sum_kernel
from kernels.route import Routing
from kernels.route.triton import route_kernel
from kernels.silu_mul import Act, Clamp, constants_of, num_parts
from tests.kernels.compiled import ARCHS, compile_kernel, compiled, layouts
from tests.kernels.test_linear_compiles import (
    CODES,
    KNOWN,
    TYPES,
    assert_fits,
    named,
    of_codes,
    taken,
)
from tests.kernels.test_route import FAMILIES
from tests.selection import every_pair, only

# Hidden size, an expert's inner size and how many are chosen.
QWEN3_30B, ERNIE_21B, TINY = (2048, 768, 8), (2560, 1536, 6), (64, 32, 2)
GPT_OSS = (2880, 2880, 4)
archs = pytest.mark.parametrize("arch", ARCHS)
KERNELS, NUMS_TOKENS = (gate_up_kernel, down_kernel), (1, 65)
FORMS = (None, *CODES)
# All kernels multiply by one function, so each kind of weights is in one of them.
KINDS = (None, "int8, groups", "fp8", "AWQ", "NF4")
each_form = pytest.mark.parametrize(
    ("form", "kernel"), only([*zip(KINDS, cycle(KERNELS), strict=False)], FORMS, KERNELS)
)
# float32 has no tensor cores and takes the most registers.
PRODUCTS = [
    *((shape, torch.bfloat16) for shape in (QWEN3_30B, ERNIE_21B, TINY)),
    (QWEN3_30B, torch.float32),
]
POINTERS = {"p_pairs": "*i32", "p_blocks": "*i32", "p_num_blocks": "*i32"}


def product_of(
    kernel: Any,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    num_tokens: int,
    arch: int,
    form: str | None = None,
    act: Act | Clamp = "silu",
) -> Any:
    """The arguments of ``compiled``. Without SiLU there are biases, too."""
    hidden, inner, num_chosen = shape
    is_gated = kernel is gate_up_kernel
    size = hidden if is_gated else inner
    known = DENSE if form is None else CODES[form][0]
    chosen = config(size, dtype.itemsize, block_of(num_tokens, dtype.itemsize), known)
    pointers, absent = {"codes": TYPES[dtype]}, ["p_scales", "p_zeros", "p_table"]
    if form is not None:
        pointers, absent = of_codes(form)
    pointers["p_weight"] = pointers.pop("codes")
    absent.append("p_order")
    pointers |= POINTERS | {"p_gated": TYPES[dtype]}
    if act == "silu":
        absent.append("p_bias")
    else:
        pointers["p_bias"] = TYPES[dtype]
    if is_gated:
        pointers["p_x"] = TYPES[dtype]
        sizes = {"NUM_CHOSEN": num_chosen, "PARTS": num_parts(act), "I": inner}
    else:
        pointers |= {"p_weights": "*fp32", "p_parts": TYPES[dtype]}
        sizes = {"N": hidden}
    constants = dict.fromkeys(absent) | sizes | {"K": size} | named(KNOWN, known)
    constants |= named(("BLOCK_ROWS", "BLOCK_K", "BLOCK_T"), chosen[:3])
    if is_gated:
        constants |= named(("ALPHA", "BETA", "LIMIT"), constants_of(act))
    signature = pointers | {"most": "i32"}
    return kernel, signature, constants, arch, chosen.num_warps, chosen.num_stages


def assert_product_fits(
    arch: int,
    kernel: Any,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    num_tokens: int,
    **options: Any,
) -> None:
    product = product_of(kernel, shape, dtype, num_tokens, arch, **options)
    assert_fits(taken(compiled(*product)), arch)


@cache
def layouts_of(kernel: Any, form: str | None, num_tokens: int) -> str:
    return layouts(*product_of(kernel, QWEN3_30B, torch.bfloat16, num_tokens, HOPPER, form))


@archs
@pytest.mark.parametrize(
    ("kernel", "num_tokens", "sizes"), every_pair(KERNELS, NUMS_TOKENS, PRODUCTS)
)
def test_a_product_fits(
    kernel: Any, sizes: tuple[tuple[int, int, int], torch.dtype], num_tokens: int, arch: int
) -> None:
    assert_product_fits(arch, kernel, *sizes, num_tokens)


@archs
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("num_tokens", NUMS_TOKENS)
@pytest.mark.parametrize("form", CODES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_product_with_codes_fits(
    kernel: Any, form: str, dtype: torch.dtype, num_tokens: int, arch: int
) -> None:
    assert_product_fits(arch, kernel, QWEN3_30B, dtype, num_tokens, form=form)


@archs
@pytest.mark.parametrize(
    ("kernel", "num_tokens", "form"), every_pair(KERNELS, NUMS_TOKENS, [None, "NF4"])
)
def test_a_product_with_biases_and_a_clamp_fits(
    kernel: Any, form: str | None, num_tokens: int, arch: int
) -> None:
    options = {"form": form, "act": Clamp(1.702, 7.0)}
    assert_product_fits(arch, kernel, GPT_OSS, torch.bfloat16, num_tokens, **options)


@archs
@pytest.mark.parametrize(
    ("kernel", "num_tokens"), [(gate_up_kernel, MANY_TOKENS), (down_kernel, VERY_MANY_TOKENS)]
)
def test_a_product_of_a_long_prompt_fits(kernel: Any, num_tokens: int, arch: int) -> None:
    options: dict[str, Any] = {"act": Clamp(1.702, 7.0)}
    assert_product_fits(arch, kernel, GPT_OSS, torch.bfloat16, num_tokens, **options)


@pytest.mark.parametrize("num_tokens", NUMS_TOKENS)
def test_a_product_without_gates_fits(num_tokens: int) -> None:
    given = gate_up_kernel, QWEN3_30B, torch.bfloat16, num_tokens
    assert_product_fits(HOPPER, *given, act="relu2")


@pytest.mark.parametrize("num_tokens", [*NUMS_TOKENS, VERY_MANY_TOKENS])
@each_form
def test_no_iteration_waits_for_its_own_loads(
    kernel: Any, form: str | None, num_tokens: int
) -> None:
    """Weights and tokens are prefetched; scales and zeros are loaded for the next iteration."""
    text = layouts_of(kernel, form, num_tokens)
    loop = re.search(r"scf\.for .*?\n(.*?scf\.yield.*?)\n", text, re.DOTALL)
    assert loop is not None
    lines = loop[1].splitlines()
    assert sum("async_copy_global_to_local" in line for line in lines) >= 2
    loaded = [line.split()[0] for line in lines if "= tt.load " in line]
    for name in loaded:
        used = [line for line in lines if re.search(rf"{re.escape(name)}\b", line)]
        assert [line.split()[0] for line in used] == [name, "scf.yield"]


@each_form
def test_a_sum_has_the_same_order_for_all_numbers_of_tokens(kernel: Any, form: str | None) -> None:
    """The instruction and, for codes, the span per multiplication."""
    orders = set()
    for num_tokens in (*NUMS_TOKENS, MANY_TOKENS, VERY_MANY_TOKENS):
        text = layouts_of(kernel, form, num_tokens)
        (version,) = set(re.findall(r"nvidia_mma<\{versionMajor = (\d)", text))
        spans = re.findall(r"tt\.dot .* : tensor<(4x)\d+(x\d+)xbf16", text)
        assert len(spans) == (form is not None)
        assert "tt.reduce" not in text
        orders.add((version, *spans))
    assert len(orders) == 1


@archs
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("num_experts", [8, 256])
def test_placing_pairs_fits(num_experts: int, block_size: int, arch: int) -> None:
    sizes = dict.fromkeys(["num_pairs", "most", "first_expert"], "i32")
    signature = POINTERS | {"p_chosen": "*i32"} | sizes
    constants = {"BLOCK_E": num_experts, "BLOCK_SIZE": block_size, "BLOCK": BLOCK}
    assert_fits(compile_kernel(place_kernel, signature, constants, arch, num_warps=4), arch)


@archs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_adding_up_fits(dtype: torch.dtype, arch: int) -> None:
    signature = dict.fromkeys(["p_parts", "p_residual", "p_out"], TYPES[dtype])
    constants = {"NUM_CHOSEN": 8, "N": 2048, "BLOCK": SUM_BLOCK}
    assert_fits(compile_kernel(sum_kernel, signature, constants, arch, num_warps=4), arch)


@archs
@pytest.mark.parametrize(("num_experts", "routing"), FAMILIES.values(), ids=FAMILIES)
def test_routing_fits(num_experts: int, routing: Routing, arch: int) -> None:
    signature = dict.fromkeys(["p_logits", "p_bias", "p_weights"], "*fp32") | {"p_chosen": "*i32"}
    signature |= {"min_sum": "fp32", "factor": "fp32"}
    size = num_experts // routing.num_groups
    constants: dict[str, Any] = {
        "NUM_CHOSEN": routing.num_chosen,
        "SCORE": routing.score,
        "IS_DIVIDED": routing.min_sum is not None,
        "NUM_GROUPS": routing.num_groups,
        "GROUP_SIZE": size,
        "NUM_KEPT": routing.num_kept_groups,
        "GROUP_BEST": routing.group_best,
        "BLOCK_GROUPS": triton.next_power_of_2(routing.num_groups),
        "BLOCK_SIZE": triton.next_power_of_2(size),
        "BLOCK_CHOSEN": triton.next_power_of_2(routing.num_chosen),
    }
    assert_fits(compile_kernel(route_kernel, signature, constants, arch, num_warps=1), arch)
