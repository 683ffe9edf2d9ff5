"""Images and videos of Qwen3.5, with a state in most layers, against transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.engines import ENGINES, make_engine
from services.worker.media.rotations import axes_of
from services.worker.models.registry import read_model_config
from shared.errors import ConfigError
from tests.media.references import Clip, Reference
from tests.media.videos import scene
from tests.selection import only
from tests.services.worker.checkpoints import change_config
from tests.services.worker.media import scheduled
from tests.services.worker.media.prompts import GREEDY, Chat, chat, texts_of

LIMITS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 512}
EXPERTS = pytest.param("qwen3.5-moe", marks=pytest.mark.slow)
pytestmark = pytest.mark.parametrize("folder", ["qwen3.5", EXPERTS], indirect=True, scope="session")


@pytest.fixture(scope="session")
def chats(oracle: Reference) -> dict[str, Chat]:
    first, second = oracle.picture(1, 3, 4), oracle.picture(2, 3, 4)
    side = oracle.side
    film = Clip(scene(3, 4, 3 * side, 2 * side), labels=["<0.2 seconds>", "<1.2 seconds>"])
    return {
        "first": chat(oracle, "Describe it. ", first, "In one word."),
        "second": chat(oracle, "Describe it. ", second, "In one word."),
        "two": chat(oracle, first, " and ", oracle.picture(3, 2, 7), ": which is wider?"),
        "film": chat(oracle, "Describe it. ", film, " Then ", second),
        "none": chat(oracle, "No picture at all."),
    }


@pytest.mark.parametrize("kernels", only([("native",)], ENGINES))
def test_texts_match_transformers(folder: Path, chats: dict[str, Chat], kernels: str) -> None:
    assert chats["first"].expected.ids != chats["second"].expected.ids
    expected = [each.expected.ids for each in chats.values()]
    engine = make_engine(folder, kernels, **LIMITS)
    assert engine.capacity.all_media == ("image", "video")
    for chunk_size in (1, 7, 1000):
        assert texts_of(engine, [*chats.values()], chunk_sizes=[chunk_size]) == expected
    alone = [texts_of(engine, [each], chunk_sizes=[30])[0] for each in chats.values()]
    assert alone == expected


@pytest.mark.parametrize("method", ["ngram", pytest.param("mtp", marks=pytest.mark.slow)])
def test_drafts_change_no_text(
    folder: Path, tmp_path: Path, chats: dict[str, Chat], method: str
) -> None:
    """An MTP head reads placeholders in place of features."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    add_mtp_head(tmp_path)
    config = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    drafting = make_engine(tmp_path, speculative_config=config, **LIMITS)
    assert drafting.capacity.num_speculative_tokens == 2
    texts = texts_of(drafting, [*chats.values()], chunk_sizes=[50], depth=2)
    assert texts == [each.expected.ids for each in chats.values()]


def add_mtp_head(folder: Path) -> None:
    """Its block is the trunk's layer with attention."""
    file, random = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors, layer = load_file(file), "model.language_model.layers.1."
    head = {
        name.replace(layer, "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    head |= {f"mtp.{name}.weight": torch.zeros(64) for name in norms}
    head["mtp.fc.weight"] = torch.randn(64, 128, generator=random)
    save_file(tensors | head, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, text_config=config | {"mtp_num_hidden_layers": 1})


def test_a_full_step_may_compute_the_last_cached_id_again(
    folder: Path, tmp_path: Path, oracle: Reference
) -> None:
    """An MTP head needs its state. The last prompt begins at the state of 192 ids, in a picture."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    add_mtp_head(tmp_path)
    config = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    limits = LIMITS | {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    engine = make_engine(tmp_path, speculative_config=config, **limits)
    same = chat(oracle, *(oracle.picture(seed, 6, 9) for seed in range(4)), "In one word?")
    found = scheduled.run(engine, [same] * 3, [GREEDY] * 3)
    assert found.texts == [same.expected.ids] * 3
    assert found.num_hits > 0


@pytest.mark.parametrize("kernels", ["native", pytest.param("device", marks=pytest.mark.slow)])
def test_hits_begin_at_kept_states(folder: Path, chats: dict[str, Chat], kernels: str) -> None:
    engine = make_engine(
        folder, kernels, **LIMITS | {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    )
    wanted = [*chats.values()] * 3
    found = scheduled.run(engine, wanted, [GREEDY] * len(wanted))
    assert found.texts == [each.expected.ids for each in wanted]
    assert found.num_hits > 0


def test_a_section_must_cover_the_frequencies(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    config = read_model_config(tmp_path)
    assert axes_of(config, 3) == [0, 1, 2, 0, 1, 2, 0, 0]
    for section in ([4, 2, 1], None):
        rotations = config.rope_values | {"mrope_section": section}
        with pytest.raises(ConfigError, match="the sum 8, half of the rotated part"):
            axes_of(msgspec.structs.replace(config, rope_parameters=rotations), 3)
