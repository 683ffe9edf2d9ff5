"""The worker's view of its machine."""

import os
import subprocess
import sys

CODE = """
import torch
from services.worker.machine.hardware import compute_exactly
products = torch.backends.cuda.matmul
assert products.allow_tf32, "the environment asks for it"
compute_exactly()
print(products.allow_tf32, products.allow_bf16_reduced_precision_reduction)
"""


def test_products_are_exact_whatever_the_environment_sets() -> None:
    """Images with PyTorch set this variable, for training."""
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
