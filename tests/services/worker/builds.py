"""The native variants in tests: always the best and the plainest, those between them in slow
tests."""

import pytest

from kernels.cpu.library import variants

FOUND = variants()
each_variant = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=() if name in (FOUND[0], FOUND[-1]) else pytest.mark.slow)
        for name in FOUND
    ],
)
