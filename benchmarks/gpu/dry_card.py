"""A simulated GPU: Triton specialises, compiles and launches for it, but nothing runs. Its launcher
needs a C compiler.

Outputs of kernels are zeros instead of uninitialized memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import CDLL, Structure, c_float, c_int32, c_int64, c_uint32, c_uint64
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src
from triton.runtime.jit import JITFunction

import kernels.linear.triton  # noqa: F401 - asks, when it is imported, whether it is interpreted
from kernels import dispatch

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
AMPERE, HOPPER = 80, 90
MAX_SHARED_BYTES = {AMPERE: 163 << 10, HOPPER: 227 << 10}
ALIGNED_BYTES = 16
NUM_REGISTERS = 1 << 16  # per multiprocessor
WARP_SIZE = 32
NUMBERS: dict[str, Any] = {"i32": c_int32, "i64": c_int64, "u1": c_uint32, "fp32": c_float}
_empty = torch.empty
_devices = count()


class Resources(NamedTuple):
    num_registers: int
    num_stack_bytes: int  # local memory of a thread, mostly spilled registers
    shared_bytes: int


class LoadedModel(NamedTuple):
    """One variant of a kernel."""

    name: str
    resources: Resources = Resources(1, 0, 0)
    cubin: bytes = b""

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
    """Triton's driver with a device of its own, so that kernels compiled for another device are
    compiled (or found on disk) again."""

    def __init__(self, arch: int = HOPPER, watch: Callable[[Launch], None] | None = None) -> None:
        """``watch`` is called with each launch."""
        self.loaded: list[LoadedModel] = []
        self.num_launches = 0
        self.watch = watch
        self.launcher_cls: Callable[..., Any] = partial(CheckedLauncher, self)
        self.utils = object.__new__(nvidia.CudaUtils)  # of which there is one only for a real GPU
        self.utils.__init__()
        self._load = self.utils.load_binary
        self.utils.load_binary = self._load_binary
        self.utils.get_device_properties = lambda _: {"max_shared_mem": MAX_SHARED_BYTES[arch]}
        self._arch, self._device = arch, next(_devices)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, WARP_SIZE)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def _load_binary(
        self, name: str, binary: bytes, shared_bytes: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Module, function (its index in ``loaded``), registers, spills and the most threads of a
        block."""
        self._load(name, binary, shared_bytes, device)
        found = resources(binary, shared_bytes)
        function, max_threads = self.add(LoadedModel(name, found, binary)), NUM_REGISTERS
        max_threads //= max(1, found.num_registers)
        return 0, function, found.num_registers, found.num_stack_bytes, max_threads

    def add(self, model: LoadedModel) -> int:
        self.loaded.append(model)
        return len(self.loaded) - 1


class Noted(Structure):
    """``noted`` of dry_driver.c"""

    _fields_ = (("count", c_uint32), ("num_params", c_uint32), ("params", c_uint64 * 64))


class CheckedLauncher(nvidia.CudaLauncher):
    """Triton's launcher. Raises ValueError for arguments that do not reach the driver as they are,
    and for pointers that are not aligned, for which Triton would compile the kernel again."""

    def __init__(self, card: DryDriver, source: Any, metadata: Any) -> None:
        super().__init__(source, metadata)
        if metadata.global_scratch_size:
            raise ValueError(f"{metadata.name} wants memory of its own")
        self._card, self._metadata, self._types = card, metadata, dict(source.signature)
        self._noted = Noted.in_dll(CDLL(self.launch.__self__.__file__), "noted")

    def __call__(self, *arguments: Any) -> None:
        grid, function, values = arguments[:3], arguments[4], arguments[9:]
        name, noted, num_before = self._metadata.name, self._noted, self._noted.count
        given = dict(zip(self._types, values, strict=True))
        params = [each for key in given for each in _params(key, self._types[key], given[key])]
        noted.num_params = len(params)
        super().__call__(*arguments)
        if not all(grid):  # Triton launches nothing
            return
        if noted.count == num_before:
            raise ValueError(f"{name}: no GPU has a grid of {grid}")
        for (key, kind, value), found in zip(params, noted.params, strict=False):
            packed = kind.from_buffer_copy(found.to_bytes(8, "little")).value
            if packed != value:
                raise ValueError(f"{name}: {key} is {value}, and {packed} for the GPU")
        self._card.num_launches += 1
        if self._card.watch is not None:
            facts = self._metadata.num_warps, given, self._metadata.launch_pdl
            self._card.watch(Launch(self._card.loaded[function], grid, *facts))


@contextmanager
def dry_card(
    arch: int = HOPPER, watch: Callable[[Launch], None] | None = None, *, compiles: bool = True
) -> Iterator[DryDriver]:
    """Within it operators launch kernels on the simulated GPU, for tensors on any device; ``watch``
    is called with each launch. Kernels that are not compiled need no shared memory."""
    with launching(arch, watch, compiles=compiles) as card, ExitStack() as stack:
        for where, name, value in (
            (torch, "empty", _zeros),
            (torch, "empty_like", torch.zeros_like),
            (Tensor, "new_empty", Tensor.new_zeros),
        ):
            stack.enter_context(patch.object(where, name, value))
        yield card


@contextmanager
def launching(
    arch: int = HOPPER, watch: Callable[[Launch], None] | None = None, *, compiles: bool = True
) -> Iterator[DryDriver]:
    """``dry_card`` with uninitialized memory."""
    with ExitStack() as stack:
        for where, name, value in (
            (nvidia, "library_dirs", list),
            (nvidia, "compile_module_from_file", _compile_module),
            (nvidia, "compile_module_from_src", _compile_module),  # before Triton 3.9
            (dispatch, "IS_INTERPRETED", True),
        ):
            stack.enter_context(patch.object(where, name, value, create=where is nvidia))
        if not compiles:
            stack.enter_context(patch.object(JITFunction, "_do_compile", _load_uncompiled))
        card = DryDriver(arch, watch)
        stack.enter_context(patch.object(triton.runtime.driver, "_active", card))
        yield card


def _compile_module(
    name: str, include_dirs: list[str], src: str = "", src_path: str = "", **libraries: Any
) -> Any:
    """Compiles Triton's C for Python with dry_driver.c in place of a driver's library."""
    source = src or Path(src_path).read_text()
    driver = Path(__file__).with_name("dry_driver.c").read_text()
    return compile_module_from_src(driver + source, name, include_dirs=include_dirs)


def _load_uncompiled(
    function: Any, key: str, signature: Any, device: int, constants: Any, options: Any, *others: Any
) -> Any:
    """In place of ``JITFunction._do_compile``."""
    card, name = triton.runtime.driver.active, function.__name__
    sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    aligned = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    metadata = SimpleNamespace(**vars(options), **sizes, **aligned, name=name)
    source = ASTSource(function, signature, constants, others[0])
    kernel = SimpleNamespace(
        run=card.launcher_cls(source, metadata),
        function=card.add(LoadedModel(name)),
        packed_metadata=(options.num_warps, options.num_ctas, 0),
        launch_metadata=lambda *arguments: None,
    )
    function.device_caches[device][0][key] = kernel
    return kernel


def _params(name: str, kind: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and value of what the driver gets for an argument."""
    if isinstance(kind, tuple):
        for index, part in enumerate(zip(kind, value, strict=True)):
            yield from _params(f"{name}[{index}]", *part)
    elif kind.startswith("*"):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {value!r}, no tensor")
        if value.data_ptr() % ALIGNED_BYTES:
            raise ValueError(f"{name} does not begin at a multiple of {ALIGNED_BYTES} bytes")
        yield name, c_uint64, value.data_ptr()
    elif kind != "constexpr":
        number = NUMBERS[kind]
        yield name, number, number(value).value if number is c_float else value


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
