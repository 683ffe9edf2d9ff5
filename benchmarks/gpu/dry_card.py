"""A simulated GPU: Triton's JIT binds, specialises and compiles for it, but nothing runs.

Outputs of kernels are zeros instead of uninitialized memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

import kernels.linear.triton  # noqa: F401 - asks, when it is imported, whether it is interpreted
from kernels import dispatch

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
AMPERE, HOPPER = 80, 90
MAX_SHARED_BYTES = {AMPERE: 163 << 10, HOPPER: 227 << 10}
ALIGNED_BYTES = 16
MAX_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)
NUM_REGISTERS = 1 << 16  # per multiprocessor
WARP_SIZE = 32
_empty = torch.empty


class Resources(NamedTuple):
    num_registers: int
    num_stack_bytes: int  # local memory of a thread, mostly spilled registers
    shared_bytes: int


class LoadedModel(NamedTuple):
    """One variant of a kernel."""

    name: str
    resources: Resources
    cubin: bytes

    @property
    def num_stack_bytes(self) -> int:
        return self.resources.num_stack_bytes


class Launch(NamedTuple):
    """The arguments of a kernel launch."""

    model: LoadedModel
    grid: tuple[int, int, int]
    num_warps: int
    arguments: dict[str, Any]  # by name, including constants
    is_dependent: bool  # starts before the previous launch has ended


class DryDriver:
    """Triton's driver, its ``utils``, and a device of its own, so that kernels compiled for another
    device are compiled (or found on disk) again."""

    def __init__(self, arch: int = HOPPER, watch: Callable[[Launch], None] | None = None) -> None:
        """``watch`` is called with each launch."""
        self.loaded: list[LoadedModel] = []
        self.num_launches = 0
        self._watch = watch
        self.utils = self
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, WARP_SIZE)

    def get_current_device(self) -> object:
        return self

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_device_properties(self, device: object) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED_BYTES[self._arch]}

    def load_binary(
        self, name: str, binary: bytes, shared_bytes: int, device: object
    ) -> tuple[int, int, int, int, int]:
        """Module, function (its index in ``loaded``), registers, spills and the most threads of a
        block."""
        found = resources(binary, shared_bytes)
        self.loaded.append(LoadedModel(name, found, binary))
        function, max_threads = len(self.loaded) - 1, NUM_REGISTERS // max(1, found.num_registers)
        return 0, function, found.num_registers, found.num_stack_bytes, max_threads

    def unload_module(self, module: int) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Returns a launcher that only checks its arguments. The launcher raises ValueError."""
        types = list(source.signature.items())
        if metadata.global_scratch_size:
            raise ValueError(f"{metadata.name} wants memory of its own")

        def launch(*arguments: Any) -> None:
            self.num_launches += 1
            grid, function, values = arguments[:3], arguments[4], arguments[9:]
            if any(size > most for size, most in zip(grid, MAX_GRID, strict=True)):
                raise ValueError(f"{metadata.name}: no GPU has a grid of {grid}")
            for (name, kind), value in zip(types, values, strict=True):
                _check(f"{metadata.name}: {name}", kind, value)
            if self._watch is not None:
                names = (name for name, _ in types)
                given = dict(zip(names, values, strict=True))
                facts = metadata.num_warps, given, metadata.launch_pdl
                self._watch(Launch(self.loaded[function], grid, *facts))

        return launch


@contextmanager
def dry_card(
    arch: int = HOPPER, watch: Callable[[Launch], None] | None = None
) -> Iterator[DryDriver]:
    """Within it operators launch kernels on the simulated GPU, for tensors on any device; ``watch``
    is called with each launch."""
    card = DryDriver(arch, watch)
    with ExitStack() as stack:
        for where, name, value in (
            (triton.runtime.driver, "_active", card),
            (dispatch, "IS_INTERPRETED", True),
            (torch, "empty", _zeros),
            (torch, "empty_like", torch.zeros_like),
            (Tensor, "new_empty", Tensor.new_zeros),
        ):
            stack.enter_context(patch.object(where, name, value))
        yield card


def _zeros(*shape: Any, **options: Any) -> Tensor:
    """On the meta device torch uses torch.empty for zeros."""
    device = options.get("device") or torch.get_default_device()
    make = _empty if torch.device(device).type == "meta" else torch.zeros
    return make(*shape, **options)


@lru_cache(maxsize=1024)
def resources(cubin: bytes, shared_bytes: int) -> Resources:
    """The resources of a multiprocessor a kernel needs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        facts = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", facts)
    if found is None:
        raise ValueError(f"unexpected output of cuobjdump: {facts}")
    return Resources(int(found[1]), int(found[2]), shared_bytes)


def _check(name: str, kind: Any, value: Any) -> None:
    """Checks pointers: for unaligned ones Triton would compile the kernel again."""
    if isinstance(kind, tuple):
        for index, part in enumerate(zip(kind, value, strict=True)):
            _check(f"{name}[{index}]", *part)
    if isinstance(kind, str) and kind.startswith("*"):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {value!r}, no tensor")
        if value.data_ptr() % ALIGNED_BYTES:
            raise ValueError(f"{name} does not begin at a multiple of {ALIGNED_BYTES} bytes")
