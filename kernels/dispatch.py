"""Which code of an operator runs: Triton's, or torch's."""

import os

from torch import Tensor

# Triton's interpreter runs kernels on CPU tensors, slowly: its tests have a process of their own.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The default of Triton before 3.9; from 3.9 on it has to be set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def runs_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda or IS_INTERPRETED
