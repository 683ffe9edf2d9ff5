"""The builds of native code that tests run on: the best and the plainest always, those between them
with the slow tests."""

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
