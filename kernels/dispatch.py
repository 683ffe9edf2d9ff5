"""Chooses Triton's or torch's implementation of an operator."""

import os

from torch import Tensor

# Triton's interpreter runs kernels on CPU tensors, slowly, so its tests have their own process.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's default before 3.9; from 3.9 on it must be set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def runs_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda or IS_INTERPRETED
