"""Compiles Triton kernels for simulated GPUs, to inspect their resources."""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from benchmarks.gpu.dry_card import AMPERE, HOPPER, Resources, resources

Kind = str | tuple[str, ...]  # a tuple means a tuple of pointers
ALIGNED: list[list[Any]] = [["tt.divisibility", 16]]
COMPILERS = os.environ.get("CC", "gcc"), "clang"
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS))
    or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="Triton's launcher needs a C compiler and Python.h",
)
ARCHS = [pytest.param(AMPERE, marks=pytest.mark.slow), HOPPER]


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, Kind],
    constants: Mapping[str, Any],
    arch: int,
    *,
    num_warps: int,
    num_stages: int = 3,
    max_registers: int | None = None,
) -> Resources:
    """Arguments as in ``compiled``."""
    found = compiled(kernel, signature, constants, arch, num_warps, num_stages, max_registers)
    return resources(found.asm["cubin"], found.metadata.shared)


def compiled(
    kernel: Any,
    signature: Mapping[str, Kind],
    constants: Mapping[str, Any],
    arch: int,
    num_warps: int,
    num_stages: int,
    max_registers: int | None = None,
) -> Any:
    """Arguments as in ``source_of``."""
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers}
    source = source_of(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def layouts(
    kernel: Any,
    signature: Mapping[str, Kind],
    constants: Mapping[str, Any],
    arch: int,
    num_warps: int,
    num_stages: int,
) -> str:
    """TTGIR, the last form before machine code, which takes most of the time. Arguments as in
    ``source_of``."""
    source, target = source_of(kernel, signature, constants), GPUTarget("cuda", arch, 32)
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options({"num_warps": num_warps, "num_stages": num_stages})
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    for name in ("ttir", "ttgir"):
        module = stages[name](module, {})
    return str(module)


def source_of(
    kernel: Any, signature: Mapping[str, Kind], constants: Mapping[str, Any]
) -> ASTSource:
    """``signature``: the types of the arguments other than ``constants``, for example "*bf16" and
    "i32". Pointers, and integers written "i32:16", are multiples of 16, as for torch's tensors."""
    types: dict[str, Kind] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    indices = {name: index for index, name in enumerate(kernel.arg_names)}
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            types[name] = kind
            aligned |= {(indices[name], part): ALIGNED for part in range(len(kind))}
        else:
            types[name] = kind.removesuffix(":16")
            if kind.startswith("*") or kind.endswith(":16"):
                aligned[indices[name],] = ALIGNED
    constexprs = {(indices[name],): value for name, value in constants.items()}
    types |= dict.fromkeys(constants, "constexpr")
    return ASTSource(kernel, types, constexprs, aligned)
