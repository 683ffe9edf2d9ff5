"""Everything that samples: torch, and every build of the native code that this CPU can run."""

import pytest

from kernels.cpu.library import load_library, variants
from kernels.cpu.sampler import NativeSampler
from services.worker.sampler import Sampler, TorchSampler


@pytest.fixture(scope="session", params=["torch", *variants()])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    if request.param == "torch":
        return TorchSampler()
    return NativeSampler(load_library(request.param), num_threads=2)
