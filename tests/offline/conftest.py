from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from shoal import LLM

SMALL: dict[str, Any] = {"num_threads": 1, "schedulers": 1}  # other tests need the cores


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """A mesh with the embedded model, and room for adapters."""
    adapters: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    with (
        TemporaryDirectory(prefix="shoal-") as folder,
        LLM(mesh_dir=Path(folder), **adapters, **SMALL) as llm,
    ):
        yield llm
