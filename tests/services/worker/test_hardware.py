"""The worker's view of its machine."""

import torch

from services.worker.machine.hardware import compute_exactly


def test_products_are_exact_whatever_the_environment_sets() -> None:
    """Images with PyTorch set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, for training."""
    products = torch.backends.cuda.matmul
    before = products.allow_tf32, products.allow_bf16_reduced_precision_reduction
    products.allow_tf32 = products.allow_bf16_reduced_precision_reduction = True
    try:
        compute_exactly()
        found = products.allow_tf32, products.allow_bf16_reduced_precision_reduction
    finally:
        products.allow_tf32, products.allow_bf16_reduced_precision_reduction = before
    assert found == (False, False)
