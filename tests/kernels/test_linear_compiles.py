"""GEMMs of few tokens, norms and gates, compiled for simulated GPUs."""

import re
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch

from benchmarks.gpu.dry_card import HOPPER, MAX_SHARED_BYTES, Resources, resources
from kernels.codes.triton import ALL, DENSE, Constants, decode_kernel
from kernels.linear.config import codes_config, config
from kernels.linear.triton import gated_kernel, linear_kernel
from kernels.rms_norm.triton import config as norm_config
from kernels.rms_norm.triton import rms_norm_kernel
from kernels.silu_mul import CURVES, Clamp, constants_of
from kernels.silu_mul.triton import BLOCK, silu_mul_kernel
from tests.kernels.compiled import ARCHS, compile_kernel, compiled, layouts
from tests.selection import only

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
# [rows, columns] of the weights of Qwen3-8B, a Llama of 1B and the embedded model.
QKV, OUT, DOWN, HEAD = (6144, 4096), (4096, 4096), (4096, 12288), (151936, 4096)
SMALL_QKV, SMALL_DOWN = (3072, 2048), (2048, 8192)
TINY_QKV, TINY_DOWN = (512, 256), (256, 768)
ADDED = (OUT, DOWN, SMALL_DOWN, TINY_DOWN)
GATED = [(24576, 4096), (1536, 256)]
# float32 has no tensor cores and takes the most registers.
WIDEST = [(HEAD, 64, torch.float32), (TINY_QKV, 64, torch.float32)]
ALWAYS = {(QKV, 1), (HEAD, 1), (DOWN, 64), (TINY_DOWN, 64)}
PRODUCTS = [
    pytest.param(
        shape,
        num,
        torch.bfloat16,
        marks=() if (shape, num) in ALWAYS else pytest.mark.slow,
    )
    for shape in (QKV, OUT, DOWN, HEAD, SMALL_QKV, SMALL_DOWN, TINY_QKV, TINY_DOWN)
    for num in (1, 32, 64)
]
archs = pytest.mark.parametrize("arch", ARCHS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
# By name, with True if there are zeros.
CODES = {
    "int8": (Constants("int8", 1, 0.0, ALL.value), False),
    "int8, groups": (Constants("int8", 1, 0.0, 128), True),
    "fp8": (Constants("fp8", 1, 0.0, ALL.value), False),
    "fp8, blocks": (Constants("fp8", 1, 0.0, 128), False),
    "wint4": (Constants("counted", 2, -8.0, 32), False),
    "AWQ": (Constants("counted", 2, -8.0, 128), True),
    "NF4": (Constants("table", 2, 0.0, 64), False),
}


def assert_fits(resources: Resources, arch: int) -> None:
    assert resources.num_stack_bytes == 0
    assert resources.shared_bytes <= MAX_SHARED_BYTES[arch]


def product_of(
    kernel: Any, shape: tuple[int, int], dtype: torch.dtype, num_tokens: int, arch: int
) -> tuple[Any, ...]:
    """The arguments of ``compiled``. With a residual if the model has one."""
    is_gated = kernel is gated_kernel
    num_rows, size = shape
    chosen = config(num_rows, size, dtype.itemsize, num_tokens)
    there, absent = ["p_x", "p_weight", "p_out"], ["p_bias"]
    if not is_gated:
        (there if shape in ADDED else absent).append("p_residual")
    absent += ["p_scales", "p_zeros", "p_table"]
    pointers = dict.fromkeys(there, TYPES[dtype])
    if shape == HEAD:
        pointers["p_out"] = "*fp32"
    rows = {"I": num_rows // 2} if is_gated else {"N": num_rows}
    constants = dict.fromkeys(absent) | rows | {"K": size, "STRIDE": size}
    constants |= named(BLOCKS, chosen[:3]) | named(KNOWN, DENSE) | {"IS_DEPENDENT": False}
    if is_gated:
        constants |= GELU | {"p_deltas": None}
    signature = pointers | {"num_tokens": "i32"}
    return kernel, signature, constants, arch, chosen.num_warps, chosen.num_stages


BLOCKS = ("BLOCK_ROWS", "BLOCK_K", "BLOCK_T")
KNOWN = ("KIND", "PER_PLACE", "FIRST", "GROUP")

GELU = dict(zip(("ALPHA", "BETA"), CURVES["gelu_tanh"], strict=True))  # takes most


def named(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def of_codes(form: str) -> tuple[dict[str, str], list[str]]:
    """Pointers of a quantized weight, and None for missing parts."""
    known, has_zeros = CODES[form]
    codes = "*u8" if known.per_place == 2 else "*i8"
    scales = "*bf16" if form == "wint4" else "*fp32"
    pointers, absent = {"p_scales": scales}, []
    for name, is_there in (("p_zeros", has_zeros), ("p_table", known.kind == "table")):
        if is_there:
            pointers[name] = "*fp32" if name == "p_table" else "*bf16"
        else:
            absent.append(name)
    return pointers | {"codes": codes}, absent


def product_of_codes(
    kernel: Any, form: str, shape: tuple[int, int], dtype: torch.dtype, num_tokens: int, arch: int
) -> tuple[Any, ...]:
    """The arguments of ``compiled``."""
    known, _ = CODES[form]
    num_rows, size = shape
    chosen = codes_config(num_rows, size, dtype.itemsize, num_tokens, known)
    pointers, absent = of_codes(form)
    pointers["p_weight"] = pointers.pop("codes")
    pointers |= dict.fromkeys(["p_x", "p_out"], TYPES[dtype])
    if kernel is linear_kernel:
        pointers["p_residual"] = TYPES[dtype]
    rows = {"I": num_rows // 2} if kernel is gated_kernel else {"N": num_rows}
    constants = dict.fromkeys([*absent, "p_bias"]) | rows
    constants |= {"K": size, "STRIDE": size // known.per_place}
    constants |= named(BLOCKS, chosen[:3]) | named(KNOWN, known) | {"IS_DEPENDENT": False}
    if kernel is gated_kernel:
        constants |= GELU | {"p_deltas": None}
    signature = pointers | {"num_tokens": "i32"}
    return kernel, signature, constants, arch, chosen.num_warps, chosen.num_stages


@cache
def layouts_of(
    kernel: Any, shape: tuple[int, int], num_tokens: int, form: str | None = None
) -> str:
    dtype = torch.bfloat16
    if form is None:
        return layouts(*product_of(kernel, shape, dtype, num_tokens, HOPPER))
    return layouts(*product_of_codes(kernel, form, shape, dtype, num_tokens, HOPPER))


def taken(found: Any) -> Resources:
    return resources(found.asm["cubin"], found.metadata.shared)


@archs
@pytest.mark.parametrize(("shape", "num_tokens", "dtype"), [*PRODUCTS, *WIDEST], ids=str)
def test_a_product_fits(
    shape: tuple[int, int], num_tokens: int, dtype: torch.dtype, arch: int
) -> None:
    found = compiled(*product_of(linear_kernel, shape, dtype, num_tokens, arch))
    assert_fits(taken(found), arch)


@archs
@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [*((num, torch.bfloat16) for num in (1, 64)), (64, torch.float32)],
)
@pytest.mark.parametrize("shape", GATED, ids=str)
def test_gates_and_ups_fit(
    shape: tuple[int, int], num_tokens: int, dtype: torch.dtype, arch: int
) -> None:
    found = compiled(*product_of(gated_kernel, shape, dtype, num_tokens, arch))
    assert_fits(taken(found), arch)


products = pytest.mark.parametrize(
    ("kernel", "shape"),
    [(gated_kernel, GATED[0]), *((linear_kernel, shape) for shape in (QKV, OUT, SMALL_QKV))],
    ids=["gate_up", "qkv", "out", "small qkv"],
)


@products
@pytest.mark.parametrize("num_tokens", [1, 32, 64])
def test_no_iteration_waits_for_its_own_loads(
    kernel: Any, shape: tuple[int, int], num_tokens: int
) -> None:
    """Weights and tokens are prefetched, and nothing is loaded into registers."""
    text = layouts_of(kernel, shape, num_tokens)
    loop = re.search(r"scf\.for .*?\n(.*?scf\.yield.*?)\n", text, re.DOTALL)
    assert loop is not None
    lines = loop[1].splitlines()
    assert sum("async_copy_global_to_local" in line for line in lines) >= 2
    assert not [line for line in lines if "= tt.load " in line]


@products
def test_a_sum_has_the_same_order_for_all_numbers_of_tokens(
    kernel: Any, shape: tuple[int, int]
) -> None:
    """The same instruction multiplies."""
    orders = set()
    for num_tokens in (1, 32, 64):
        text = layouts_of(kernel, shape, num_tokens)
        (version,) = re.findall(r"nvidia_mma<\{versionMajor = (\d)", text)
        orders.add(version)
    assert len(orders) == 1


# Blocks of 16 rows, or 32 of many tokens; of 64; of 16, where a row is half a block.
IN_CODES: dict[str, tuple[Any, tuple[int, int]]] = {
    "down": (linear_kernel, DOWN),
    "gate_up": (gated_kernel, GATED[0]),
    "tiny": (linear_kernel, (64, 64)),
}
LARGE = ("down", "gate_up")
# All kernels multiply by one function, so each kind of codes is in one of them.
KINDS = ("int8, groups", "fp8", "AWQ", "NF4")
each_form = pytest.mark.parametrize(
    ("form", "name"), only([*zip(KINDS, cycle(LARGE), strict=False)], CODES, LARGE)
)


@archs
@pytest.mark.parametrize("num_tokens", [1, 32, 64])
@pytest.mark.parametrize("form", CODES)
@pytest.mark.parametrize("name", IN_CODES)
def test_a_product_with_codes_fits(name: str, num_tokens: int, form: str, arch: int) -> None:
    kernel, shape = IN_CODES[name]
    found = compiled(*product_of_codes(kernel, form, shape, torch.bfloat16, num_tokens, arch))
    assert_fits(taken(found), arch)


@archs
@pytest.mark.parametrize(
    ("form", "dtype"),
    only(
        [(form, torch.float32) for form in ("int8, groups", "AWQ", "NF4")],
        CODES,
        (torch.float16, torch.float32),
    ),
)
def test_a_product_with_codes_of_other_numbers_fits(
    dtype: torch.dtype, form: str, arch: int
) -> None:
    found = compiled(*product_of_codes(gated_kernel, form, GATED[0], dtype, 64, arch))
    assert_fits(taken(found), arch)


@pytest.mark.parametrize("num_tokens", [1, pytest.param(32, marks=pytest.mark.slow), 64])
@each_form
def test_no_step_waits_for_codes_that_it_loads_itself(
    name: str, num_tokens: int, form: str
) -> None:
    """Codes and tokens are prefetched; scales and zeros are loaded for the next iteration."""
    kernel, shape = IN_CODES[name]
    known, has_zeros = CODES[form]
    text = layouts_of(kernel, shape, num_tokens, form)
    loop = re.search(r"scf\.for .*?\n(.*?scf\.yield.*?)\n", text, re.DOTALL)
    assert loop is not None
    lines = loop[1].splitlines()
    assert sum("async_copy_global_to_local" in line for line in lines) >= 2
    loaded = [line.split()[0] for line in lines if "= tt.load " in line]
    for each in loaded:
        used = [line for line in lines if re.search(rf"{re.escape(each)}\b", line)]
        assert [line.split()[0] for line in used] == [each, "scf.yield"]
    assert len(loaded) == (known.group != ALL.value) * (1 + has_zeros)


@each_form
def test_a_sum_over_codes_has_the_same_order_for_all_numbers_of_tokens(
    name: str, form: str
) -> None:
    """The instruction and the spans; results of spans are added pair by pair."""
    kernel, shape = IN_CODES[name]
    orders = set()
    for num_tokens in (1, 16, 32, 64):
        text = layouts_of(kernel, shape, num_tokens, form)
        (dot,) = re.findall(r"tt\.dot .* : tensor<(4x)\d+(x\d+)xbf16", text)
        versions = set(re.findall(r"nvidia_mma<\{versionMajor = (\d)", text))
        assert "tt.reduce" not in text
        orders.add((*dot, *versions))
    assert len(orders) == 1


@archs
@pytest.mark.parametrize(
    ("form", "dtype"), only([*zip(CODES, cycle(TYPES), strict=False)], CODES, TYPES)
)
def test_decoding_fits_the_registers(form: str, dtype: torch.dtype, arch: int) -> None:
    known, _ = CODES[form]
    pointers, absent = of_codes(form)
    pointers["p_codes"] = pointers.pop("codes")
    sizes = {"K": 4096, "BLOCK_ROWS": 16, "BLOCK_K": min(256, known.group)}
    constants = dict.fromkeys(absent) | sizes | named(KNOWN, known)
    signature = pointers | {"p_ids": "*i32", "p_out": TYPES[dtype], "num_rows": "i32"}
    assert_fits(compile_kernel(decode_kernel, signature, constants, arch, num_warps=4), arch)


@archs
@dtypes
@pytest.mark.parametrize("size", [64, 256, 4096, 12288])
def test_a_norm_fits(size: int, dtype: torch.dtype, arch: int) -> None:
    pointers = dict.fromkeys(["p_x", "p_weight", "p_out"], TYPES[dtype])
    block, warps = norm_config(size, dtype.itemsize)
    constants = {"SIZE": size, "BLOCK": block, "IS_DEPENDENT": False}
    signature = pointers | {"eps": "fp32"}
    assert_fits(compile_kernel(rms_norm_kernel, signature, constants, arch, num_warps=warps), arch)


@archs
@dtypes
@pytest.mark.parametrize("clamp", [None, Clamp(1.702, 7.0)], ids=str)
def test_gates_of_many_rows_fit(dtype: torch.dtype, clamp: Clamp | None, arch: int) -> None:
    pointers = dict.fromkeys(["p_gate_up", "p_out"], TYPES[dtype])
    constants: dict[str, Any] = {"SIZE": 12288, "BLOCK": BLOCK}
    constants |= named(("ALPHA", "BETA", "LIMIT"), constants_of(clamp or "gelu_tanh"))
    assert_fits(compile_kernel(silu_mul_kernel, pointers, constants, arch, num_warps=4), arch)
