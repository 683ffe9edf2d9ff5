"""Devices of operators, and all samplers: torch, and every native variant this CPU can run."""

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.library import load_library, variants
from kernels.cpu.sampler import NativeSampler
from services.worker.step.sampler import Sampler, TorchSampler
from tests.unwritten import poison

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Scores of two experts may round to the same one, in few of many runs."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _unwritten_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@pytest.fixture(scope="session", params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """torch's form of an operator runs here, Triton's on a GPU."""
    return torch.device(request.param)


@pytest.fixture(scope="session", params=[CUDA])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """For features of Triton's kernels only."""
    return torch.device(request.param)


@pytest.fixture
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GEMMs with small weights use the blocks of large ones."""
    from kernels.linear import config

    chosen = (config.config, config.codes_config)
    with monkeypatch.context() as patch:
        patch.setattr(config, "NUM_PROCESSORS", 3)
        patch.setattr(config, "MIN_PROGRAMS", 1)
        for each in chosen:
            each.cache_clear()
        yield
    for each in chosen:
        each.cache_clear()


@pytest.fixture(scope="session", params=["torch", *variants()])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    if request.param == "torch":
        return TorchSampler()
    return NativeSampler(load_library(request.param), num_threads=2)
