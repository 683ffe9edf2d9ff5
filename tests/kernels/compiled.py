"""Compiles Triton kernels for cards that are not there, to see what they would take of them."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ALIGNED = [["tt.divisibility", 16]]
AMPERE, HOPPER = 80, 90
ARCHS = [pytest.param(AMPERE, marks=pytest.mark.slow), HOPPER]
MAX_SHARED_BYTES = {AMPERE: 163 << 10, HOPPER: 227 << 10}


class Resources(NamedTuple):
    num_registers: int
    num_stack_bytes: int  # local memory of a thread: what was spilled, mostly
    shared_bytes: int


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: int,
    *,
    num_warps: int,
    num_stages: int = 3,
) -> Resources:
    """``signature``: the types of the arguments that are not ``constants``, such as "*bf16" and
    "i32". Pointers, and integers written "i32:16", are multiples of 16, as torch's tensors are."""
    types = {name: kind.removesuffix(":16") for name, kind in signature.items()}
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    aligned = {
        (places[name],): ALIGNED
        for name, kind in signature.items()
        if kind.startswith("*") or kind.endswith(":16")
    }
    constexprs = {(places[name],): value for name, value in constants.items()}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, constexprs, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return resources(compiled.asm["cubin"], compiled.metadata.shared)


def resources(cubin: bytes, shared_bytes: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    if found is None:
        raise ValueError(f"cuobjdump said {told}")
    return Resources(int(found[1]), int(found[2]), shared_bytes)
