"""Adapters of requests that are refused; ``test_generate`` has texts of others."""

from pathlib import Path

import pytest

from shoal import LLM, LoRARequest
from shoal.lora import OwnAdapters, read_adapters
from tests.offline.conftest import SMALL


@pytest.mark.slow
def test_a_server_has_no_adapters_without_the_setting(tmp_path: Path) -> None:
    refused = pytest.raises(ValueError, match='model is "one"; served here: shoal-tiny')
    with LLM(mesh_dir=tmp_path / "mesh", **SMALL) as llm, refused:
        llm.generate("a", lora_request=LoRARequest("one", 1, str(tmp_path)))


def test_wrong_adapters(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="lora_request: expected LoRARequest, not str"):
        read_adapters("one", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lora_request: 1 for 2 prompts"):
        read_adapters([LoRARequest("one")], 2)
    adapters = OwnAdapters()
    for name, path, reason in (
        ("one", str(tmp_path / "none"), "is no folder"),
        ("a/b", str(tmp_path), "'a/b' is no name of a folder"),
        ("..", str(tmp_path), "'..' is no name of a folder"),
    ):
        with pytest.raises(ValueError, match=reason):
            adapters.load([LoRARequest(name, 1, path)], lambda requests: None)
    folder = Path(adapters.settings["lora_dir"])
    assert not [*folder.iterdir()]
    adapters.close()
    assert not folder.exists()
