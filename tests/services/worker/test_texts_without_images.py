"""The texts of families that read images too, without images."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.harness.engines import make_engine
from services.worker.media.qwen_vl import AxesConfig
from services.worker.models.registry import MODELS, read_architectures, read_model_config
from shared.errors import ConfigError
from shared.model_folder import weight_files
from shared.wire.messages import SamplingParams
from tests.media.checkpoints import save_checkpoint
from tests.media.families import FAMILIES
from tests.media.references import Expected, reference
from tests.services.worker.checkpoints import change_config
from tests.services.worker.driver import Driver, Job

NUM_TOKENS = 16
PARAMS = SamplingParams(seed=0, temperature=0.0, max_tokens=NUM_TOKENS)
OLDER = ("qwen2.5-vl", "paddleocr-vl")


SERVED = [name for name, parts in FAMILIES.items() if parts.model.__name__ in MODELS]


@pytest.fixture(scope="module", params=SERVED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    save_checkpoint(folder, family=request.param)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    chat: list[dict[str, object]] = [{"role": "user", "content": "Which of the two is larger?"}]
    return reference(folder).expect(chat, [], NUM_TOKENS)


def text_of(folder: Path, prompt: list[int], kernels: str = "torch") -> list[int]:
    engine = make_engine(folder, kernels, max_model_len=512, language_model_only=True)
    (text,) = Driver(engine, [7]).run([Job(prompt, PARAMS)])
    return text


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.slow)])
def test_text_is_that_of_transformers(folder: Path, expected: Expected, kernels: str) -> None:
    assert text_of(folder, expected.prompt_ids, kernels) == expected.ids


@pytest.mark.parametrize("folder", OLDER, indirect=True)
@pytest.mark.parametrize("kind", ["mrope", "default"])
def test_an_older_flat_config_is_read(
    folder: Path, expected: Expected, tmp_path: Path, kind: str
) -> None:
    copy = renamed(folder, tmp_path, {})
    config = json.loads((copy / "config.json").read_text())
    flat = config | config["text_config"]
    del flat["text_config"]
    scaling = {"type": kind, "mrope_section": flat.pop("rope_parameters")["mrope_section"]}
    flat |= {"rope_theta": 10000.0, "rope_scaling": scaling}
    (copy / "config.json").write_text(json.dumps(flat))
    assert text_of(copy, expected.prompt_ids) == expected.ids


@pytest.mark.parametrize("folder", OLDER, indirect=True)
@pytest.mark.parametrize(
    "prefixes",
    [
        {
            "model.": "model.language_model.",
            "visual.": "model.visual.",
            "mlp_AR.": "model.projector.",
        },
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    ],
    ids=["in the trunk", "a model within"],
)
def test_other_layouts_of_the_checkpoint_are_read(
    folder: Path, expected: Expected, tmp_path: Path, prefixes: dict[str, str]
) -> None:
    assert text_of(renamed(folder, tmp_path, prefixes), expected.prompt_ids) == expected.ids


@pytest.mark.parametrize("folder", SERVED, indirect=True)
@pytest.mark.parametrize("section", [None, [2, 3, 4], [4, 4], [9, -1, 0], "233"])
def test_a_section_must_cover_the_frequencies(folder: Path, tmp_path: Path, section: Any) -> None:
    copy = renamed(folder, tmp_path, {})
    text = json.loads((copy / "config.json").read_text())["text_config"]
    text["rope_parameters"]["mrope_section"] = section
    change_config(copy, text_config=text)
    with pytest.raises(ConfigError, match="three numbers with the sum 8"):
        read_model_config(copy)


def test_the_section_is_that_of_the_config(folder: Path) -> None:
    config = read_model_config(folder)
    assert isinstance(config, AxesConfig)
    rotations = json.loads((folder / "config.json").read_text())["text_config"]["rope_parameters"]
    assert config.rope_section == rotations["mrope_section"]
    axes = [1, 2, 0] if read_architectures(folder)[0].startswith("Ernie") else [0, 1, 2]
    assert [config.rope_axes.count(axis) for axis in axes] == config.rope_section
    is_mixed = rotations.get("mrope_interleaved", False) or axes[0] != 0
    assert (config.rope_axes != sorted(config.rope_axes)) == is_mixed


@pytest.mark.parametrize("folder", ["qwen3-vl-moe"], indirect=True)
def test_published_experts_have_their_inputs_first(
    folder: Path, expected: Expected, tmp_path: Path
) -> None:
    copy = renamed(folder, tmp_path, {})
    (file,) = weight_files(copy)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "experts" in name:
            tensors[name] = tensor.mT.contiguous()
    save_file(tensors, file, {"format": "pt"})
    assert text_of(copy, expected.prompt_ids) == expected.ids


def renamed(folder: Path, copy: Path, prefixes: dict[str, str]) -> Path:
    """A copy with other prefixes of tensors."""
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (copy / path.name).write_bytes(path.read_bytes())
    (file,) = weight_files(folder)
    tensors = {}
    for name, tensor in load_file(file).items():
        old = next((each for each in prefixes if name.startswith(each)), "")
        tensors[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    save_file(tensors, copy / file.name, {"format": "pt"})
    return copy
