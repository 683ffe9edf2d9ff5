"""Triton kernels in the interpreter, which must be chosen before Triton is imported: these tests
have their own process, ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.

The interpreter stores a bfloat16 as its bits. Its dot would multiply these bits, its casts truncate
instead of rounding and turn integers into bits, and its float32 dot depends on the processor:
patches here give the results of GPUs. The programs of a launch run in random order: a result that
depends on the order is wrong on a GPU now and then.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from kernels.dispatch import IS_INTERPRETED

RANDOM = np.random.default_rng(0)
NUMPY_TYPES: dict[str, np.dtype] = {}
collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]

if IS_INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    convert_float = interpreter._convert_float
    numpy_type = interpreter._get_np_dtype
    patch_lang = interpreter._patch_lang


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture(scope="session")
def triton_device(device: torch.device) -> torch.device:
    return device


@pytest.fixture(autouse=True, scope="session")
def _language_stays_patched() -> None:
    interpreter._patch_lang = _patch_once


@cache
def _patch_once(function: Any) -> Any:
    """Triton patches its language at each call and restores it after a launch, which took nearly
    half of the time; no test needs the original."""
    patch_lang(function)
    return interpreter._LangPatchScope()


@pytest.fixture(autouse=True, scope="session")
def _no_idle_work() -> None:
    """Half of the time went into checks for overflow, whose results the interpreter drops, and
    into tables of types."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    interpreter._get_np_dtype = _numpy_type


def _numpy_type(kind: Any) -> np.dtype:
    name = kind.scalar.name
    if name not in NUMPY_TYPES:
        NUMPY_TYPES[name] = numpy_type(kind)
    return NUMPY_TYPES[name]


@pytest.fixture(autouse=True, scope="session")
def _bfloat16_as_on_cards() -> None:
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.create_si_to_fp = _create_si_to_fp


@pytest.fixture(autouse=True, scope="session")
def _programs_in_random_order() -> None:
    interpreter.InterpreterBuilder.set_grid_dim = _set_grid_dim
    interpreter.InterpreterBuilder.set_grid_idx = _set_grid_idx


def _set_grid_dim(self: Any, *sizes: int) -> None:
    self.grid_dim = sizes
    self.order = RANDOM.permutation(int(np.prod(sizes)))


def _set_grid_idx(self: Any, *index: int) -> None:
    number = self.order[np.ravel_multi_index(index, self.grid_dim)]
    self.grid_idx = tuple(map(int, np.unravel_index(number, self.grid_dim)))


def _convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if source != tl.float32 or target != tl.bfloat16:
        return convert_float(data, source, target, rounding)
    rounded = torch.from_numpy(np.array(data, np.float32)).bfloat16()
    return rounded.view(torch.uint16).numpy()


def _create_si_to_fp(self: Any, whole: Any, target: Any) -> Any:
    wide = interpreter.TensorHandle(whole.data.astype(np.float32), tl.float32)
    return wide if target.scalar == tl.float32 else self.cast_impl(wide, target)


def _create_dot(self: Any, left: Any, right: Any, total: Any, *precision: Any) -> Any:
    """NumPy's float32 matmul rounds a row by its place in the matrix and by processor; float64 is
    practically exact."""
    product = np.matmul(_values(left), _values(right), dtype=np.float64)
    return interpreter.TensorHandle(product.astype(np.float32) + total.data, tl.float32)


def _values(handle: Any) -> np.ndarray:
    if handle.dtype.scalar != tl.bfloat16:
        return np.asarray(handle.data)
    return torch.from_numpy(np.array(handle.data)).view(torch.bfloat16).float().numpy()
