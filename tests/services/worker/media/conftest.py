"""Tiny checkpoints with a tower: Qwen2.5-VL, or a module's families."""

from pathlib import Path

import pytest

from tests.media.checkpoints import save_checkpoint
from tests.media.references import Reference, reference


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    save_checkpoint(folder, family=getattr(request, "param", "qwen2.5-vl"))
    return folder


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Reference:
    return reference(folder)
