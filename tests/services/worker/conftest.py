"""One tiny random checkpoint, and transformers' model of it, for all tests of the worker."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from benchmarks.harness.engines import NotInstalled
from tests.services.worker.checkpoints import oracle_of, save_qwen2
from tests.unwritten import poison

WITHOUT_A_WING = "TESTS_WITHOUT_A_WING"  # set where a wing is deleted


def _skipping() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except NotInstalled as missing:
        if WITHOUT_A_WING not in os.environ:
            raise
        pytest.skip(f"{missing} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    return (yield from _skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    return (yield from _skipping())


@pytest.fixture
def _unwritten_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with untied embeddings in several shards."""
    folder = tmp_path_factory.mktemp("qwen2")
    save_qwen2(folder)
    return folder


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> PreTrainedModel:
    return oracle_of(checkpoint)
