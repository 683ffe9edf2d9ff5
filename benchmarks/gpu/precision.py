"""Precision settings of torch's GEMMs: torch's defaults and a worker's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_PRODUCTS = torch.backends.cuda.matmul
FLAGS = (
    "allow_tf32",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)


def flags() -> dict[str, bool]:
    return {name: getattr(_PRODUCTS, name) for name in FLAGS}


OF_TORCH = flags()  # before this process builds a worker


@contextmanager
def as_torch_has_it() -> Iterator[None]:
    """Restores torch's defaults for a peer, since an engine changes them for the whole process."""
    before = flags()
    _set(OF_TORCH)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, bool]) -> None:
    for name, value in values.items():
        setattr(_PRODUCTS, name, value)
