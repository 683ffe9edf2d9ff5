"""Steps that run before there is work."""

import pytest

from kernels.codes.triton import Constants
from kernels.linear import FEW_TOKENS
from kernels.linear.config import codes_config, config
from services.worker.engine.device.warm_up import _small_shapes

KNOWN = Constants("counted", 2, -8.0, 32)


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (512, 256)])
def test_products_of_all_numbers_of_tokens_are_compiled(shape: tuple[int, int]) -> None:
    nums = [num_rows * width for num_rows, width in _small_shapes(max_drafts=0)]
    assert max(nums) == FEW_TOKENS
    for num in range(1, FEW_TOKENS + 1):
        assert config(*shape, 2, num) in [config(*shape, 2, each) for each in nums]
        found = codes_config(*shape, 2, num, KNOWN)
        assert found in [codes_config(*shape, 2, each, KNOWN) for each in nums]
