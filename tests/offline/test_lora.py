"""Adapters of requests, in a mesh of its own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.model_folder import EMBEDDED_MODEL
from shoal import LLM, LoRARequest, SamplingParams
from shoal.lora import OwnAdapters, read_adapters
from tests.offline.conftest import SMALL

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "The shoal of fish"


def write_adapter(folder: Path, seed: int) -> str:
    """PEFT's format, for the output layer of each attention."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for file in sorted(EMBEDDED_MODEL.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if name.endswith("o_proj.weight") and name.startswith("model.layers."):
                layer = f"base_model.model.{name.removesuffix('.weight')}.lora_"
                outputs, inputs = weight.shape
                tensors[f"{layer}A.weight"] = torch.randn(4, inputs, generator=generator)
                tensors[f"{layer}B.weight"] = torch.randn(outputs, 4, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 0.2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_texts_with_and_without(tmp_path: Path) -> None:
    one, other = (
        LoRARequest(name, number, write_adapter(tmp_path / name, number))
        for number, name in enumerate(("one", "other"), 1)
    )
    with LLM(mesh_dir=tmp_path / "mesh", enable_lora=True, max_lora_rank=8, **SMALL) as llm:
        plain, first, second = llm.generate([PROMPT] * 3, GREEDY, False, [None, one, other])
        assert [each.lora_request for each in (plain, first, second)] == [None, one, other]
        assert len({each.outputs[0].text for each in (plain, first, second)}) == 3
        (again,) = llm.generate(PROMPT, GREEDY, False, lora_request=one)
        assert again.outputs[0].text == first.outputs[0].text
        assert again.outputs[0].lora_request == one
        message = [{"role": "user", "content": "Hi"}]
        (of_base,) = llm.chat(message, GREEDY, False)
        (of_one,) = llm.chat(message, GREEDY, False, one)
        assert of_base.outputs[0].text != of_one.outputs[0].text
        with pytest.raises(ValueError, match="one is the adapter in"):
            llm.generate(PROMPT, GREEDY, False, LoRARequest("one", 1, other.lora_path))
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
            llm.generate(PROMPT, GREEDY, False, LoRARequest("empty", 3, str(tmp_path / "empty")))
        with pytest.raises(ValueError, match='model is "nothing"; served here: shoal-tiny, one'):
            llm.generate(PROMPT, GREEDY, False, LoRARequest("nothing"))


@pytest.mark.slow
def test_a_server_has_no_adapters_without_the_setting(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='model is "one"; served here: shoal-tiny'):
        llm.generate(PROMPT, GREEDY, False, LoRARequest("one", 1, str(tmp_path)))


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
