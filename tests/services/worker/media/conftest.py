"""One tiny checkpoint with a tower."""

from pathlib import Path

import pytest

from tests.media.checkpoints import Reference, reference, save_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    save_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Reference:
    return reference(folder)
