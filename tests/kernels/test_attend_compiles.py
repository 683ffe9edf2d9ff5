"""The kernels of attend compile for GPUs: registers do not spill, shared memory suffices."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
import triton

from benchmarks.gpu.dry_card import AMPERE, HOPPER, MAX_SHARED_BYTES, Resources, resources
from benchmarks.gpu.sass import read_code
from kernels.paged_attention import TILE
from kernels.paged_attention.triton import (
    NUM_SPLITS,
    Config,
    chunk_config,
    decode_config,
    num_heads_together,
)
from kernels.paged_attention.triton.chunk import chunk_kernel
from kernels.paged_attention.triton.decode import decode_kernel
from tests.kernels.compiled import ARCHS, compiled

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCALARS = {"table_stride": "i32:16", "max_keys": "i32:16", "scale": "fp32"}
FLOATS = dict.fromkeys(("p_partials", "p_weights", "p_kv_scales"), "*fp32")
BLOCK_SIZE = 16


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    value_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    codes: str | None = None
    has_ends: bool = False

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim or 0)


QWEN3_8B = Shape(32, 8, 128)
EMBEDDED = Shape(4, 2, 64)
WIDE = Shape(16, 4, 256)
ODD = Shape(8, 2, 96)
MISTRAL = QWEN3_8B._replace(window=4096)
GEMMA_2 = Shape(8, 4, 256, window=4096, softcap=50.0)
GEMMA_3 = Shape(8, 4, 256, window=1024, has_ends=True)
GPT_OSS = Shape(64, 8, 64, window=128, has_sinks=True)
DEEPSEEK_V3 = Shape(128, 128, 192, value_dim=128)
WITH_CODES = [
    *(QWEN3_8B._replace(codes=codes) for codes in ("i8", "u8")),
    *(WIDE._replace(codes=codes) for codes in ("i8", "u8")),
]
WITH_OPTIONS = [MISTRAL, GEMMA_2, GPT_OSS, DEEPSEEK_V3]


def slow(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases of ``make test-all``: the engine's own launches (``test_launches.py``) have most of the
    others."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def check(
    kernel: Any, shape: Shape, config: Config, arch: int, hides: bool, **constants: int | None
) -> None:
    found = compiled_attention(kernel, shape, config, arch, hides, **constants)
    assert_fits(resources(found.asm["cubin"], found.metadata.shared), arch)


def compiled_attention(
    kernel: Any, shape: Shape, config: Config, arch: int, hides: bool, **constants: int | None
) -> Any:
    """``constants`` are specific to this kernel."""
    value_dim = shape.value_dim or shape.head_dim
    known = {
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "VALUE_DIM": value_dim,
        "CACHE_DIM": shape.widest,
        "WINDOW": shape.window,
        "SOFTCAP": shape.softcap,
        "BLOCK_SIZE": BLOCK_SIZE,
        "BLOCK_STRIDE": BLOCK_SIZE * 2 * shape.num_kv_heads * shape.widest,
        "SCALES_STRIDE": BLOCK_SIZE * 2 * shape.num_kv_heads,
        "BLOCK_QUERIES": config.num_queries,
        "BLOCK_KEYS": config.num_keys,
        "BLOCK_DIM": triton.next_power_of_2(shape.head_dim),
        "BLOCK_VALUE": triton.next_power_of_2(value_dim),
        "IS_DEPENDENT": False,
        **constants,
        **({} if hides else {"p_first_keys": None}),
        **({} if shape.has_ends else {"p_ends": None}),
        **({} if shape.has_sinks else {"p_sinks": None}),
        **({} if shape.codes else {"p_kv_scales": None}),
    }
    own = dict.fromkeys(("p_query", "p_sinks", "p_out"), f"*{shape.dtype}")
    types = SCALARS | FLOATS | own | {"p_kv_cache": f"*{shape.codes or shape.dtype}"}
    names = kernel.arg_names
    return compiled(
        kernel,
        {
            name: types.get(name, "*i32")
            for name in names
            if name not in known and name[0].islower()
        },
        {name: value for name, value in known.items() if name in names},
        arch,
        config.num_warps,
        config.num_stages,
        config.max_registers if kernel is decode_kernel else None,
    )


def assert_fits(resources: Resources, arch: int) -> None:
    assert resources.num_stack_bytes == 0
    assert resources.shared_bytes <= MAX_SHARED_BYTES[arch]


@pytest.mark.parametrize(
    ("shape", "width", "hides", "arch", "num_rows"),
    [
        (QWEN3_8B, 1, False, HOPPER, 2),
        (QWEN3_8B, 5, True, AMPERE, 2),
        (DEEPSEEK_V3, 1, False, HOPPER, 1),
        (GPT_OSS, 1, False, HOPPER, 1),
        (WIDE._replace(codes="u8"), 1, False, HOPPER, 1),
        *slow([(QWEN3_8B, 1, False, HOPPER, 1)]),
        *slow(
            (*case, num_rows)
            for num_rows in (1, 2)
            for case in (
                (QWEN3_8B, 1, True, AMPERE),
                (QWEN3_8B, 5, True, HOPPER),
                (QWEN3_8B, 17, False, HOPPER),
                (QWEN3_8B, 17, False, AMPERE),
                (EMBEDDED, 1, False, HOPPER),
                (ODD, 3, False, HOPPER),
                (WIDE, 1, False, HOPPER),
                (WIDE, 17, False, HOPPER),
                (QWEN3_8B._replace(dtype="fp32"), 5, False, HOPPER),
                (WIDE._replace(dtype="fp32"), 1, False, HOPPER),
                *((shape, 1, False, HOPPER) for shape in (MISTRAL, GEMMA_2, *WITH_CODES)),
                *((shape, 5, True, AMPERE) for shape in WITH_CODES),
                (WITH_CODES[0]._replace(dtype="fp32"), 1, False, HOPPER),
                *((shape, 5, False, HOPPER) for shape in WITH_OPTIONS),
                *((shape._replace(dtype="fp32"), 1, False, HOPPER) for shape in WITH_OPTIONS),
            )
        ),
    ],
)
def test_rows_that_decode(shape: Shape, width: int, hides: bool, arch: int, num_rows: int) -> None:
    num_queries = width * shape.num_heads // shape.num_kv_heads
    dtype, has_codes = DTYPES[shape.dtype], shape.codes is not None
    config = decode_config(num_queries, shape.widest, dtype, num_rows, has_codes=has_codes)
    sizes = {"WIDTH": width, "NUM_SPLITS": NUM_SPLITS, "SPLIT_TILES": 2}
    num_tiles = triton.cdiv(num_queries, config.num_queries)
    check(decode_kernel, shape, config, arch, hides, **sizes, NUM_TILES=num_tiles)


@pytest.mark.parametrize("arch", ARCHS)
def test_parts_are_stored_before_they_are_counted(arch: int) -> None:
    """A barrier and a fence lie between the stores of parts and the counter."""
    shape, config = QWEN3_8B, decode_config(4, 128, torch.bfloat16, 2)
    sizes = {"WIDTH": 1, "NUM_SPLITS": NUM_SPLITS, "SPLIT_TILES": 2, "NUM_TILES": 1}
    found = compiled_attention(decode_kernel, shape, config, arch, False, **sizes)
    names = [each.name for each in read_code(found.asm["cubin"])]
    count = next(index for index, name in enumerate(names) if name.startswith("ATOM"))
    fence = max(index for index, name in enumerate(names[:count]) if name.startswith("MEMBAR"))
    barrier = max(index for index, name in enumerate(names[:fence]) if name.startswith("BAR"))
    assert any(name.startswith("STG") for name in names[:barrier])
    assert not any(name.startswith("STG") for name in names[barrier:count])
    assert any(name.startswith("BAR") for name in names[count:]), "before others read"


@pytest.mark.parametrize(
    ("shape", "hides", "arch"),
    [
        (QWEN3_8B, False, AMPERE),
        (QWEN3_8B, True, HOPPER),
        (GPT_OSS, False, HOPPER),
        (GEMMA_3, False, HOPPER),
        *slow(
            (
                (DEEPSEEK_V3, False, HOPPER),
                (QWEN3_8B, False, HOPPER),
                (EMBEDDED, True, HOPPER),
                (EMBEDDED, False, AMPERE),
                (WIDE, False, HOPPER),
                (ODD, False, HOPPER),
                (QWEN3_8B._replace(dtype="fp32"), False, HOPPER),
                *((shape, False, HOPPER) for shape in (MISTRAL, GEMMA_2, *WITH_CODES)),
                *((shape, True, AMPERE) for shape in WITH_CODES),
                (WITH_CODES[0]._replace(dtype="fp32"), False, HOPPER),
                *((shape._replace(dtype="fp32"), False, HOPPER) for shape in WITH_OPTIONS),
            )
        ),
    ],
)
def test_chunks(shape: Shape, hides: bool, arch: int) -> None:
    dtype, has_codes = DTYPES[shape.dtype], shape.codes is not None
    config = chunk_config(shape.widest, dtype, has_codes=has_codes)
    check_chunks(shape, config, arch, hides, num_heads_together(*shape[:2]))


@pytest.mark.slow
@pytest.mark.parametrize("num_shared", [1, 2])
def test_chunks_with_other_heads_together(num_shared: int) -> None:
    check_chunks(QWEN3_8B, chunk_config(128, torch.bfloat16), HOPPER, False, num_shared)


def check_chunks(shape: Shape, config: Config, arch: int, hides: bool, num_shared: int) -> None:
    sizes = {"NUM_SHARED": num_shared, "NUM_PARTS": TILE * num_shared // config.num_queries}
    check(chunk_kernel, shape, config, arch, hides, **sizes)
