"""Images of Gemma 3, whose tokens see each other: towers and texts against transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from benchmarks.harness.engines import ENGINES, make_engine
from services.worker.media.tower import Sizes, Tower
from services.worker.models.registry import read_model_config
from shared.errors import ConfigError
from tests.media.gemma3_checkpoints import (
    NUM_TOKENS,
    SIDE,
    StretchedReference,
    gemma3_reference,
    save_gemma3,
)
from tests.media.pictures import picture
from tests.selection import only
from tests.services.worker.media import scheduled
from tests.services.worker.media.prompts import GREEDY, Chat, chat, texts_of

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512}
FIRST, SECOND, THIRD = (picture(number, SIDE, SIDE) for number in range(3))
LAYERS = ["full_attention", "sliding_attention", "full_attention"]


OTHER = pytest.param({"layer_types": LAYERS, "sliding_window": 40}, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[{}, OTHER], ids=["short window", "long window"])
def stretched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a window within an image, and with one of several images."""
    folder = tmp_path_factory.mktemp("gemma3")
    save_gemma3(folder, **request.param)
    return folder


@pytest.fixture(scope="module")
def oracle(stretched: Path) -> StretchedReference:
    return gemma3_reference(stretched)


@pytest.fixture(scope="module")
def chats(oracle: StretchedReference) -> list[Chat]:
    return [
        chat(oracle, "Describe it. ", FIRST, "In one word."),
        chat(oracle, "Describe it. ", SECOND, "In one word."),
        chat(oracle, FIRST, SECOND, "?", THIRD, FIRST),
        chat(oracle, "No picture at all."),
    ]


@pytest.mark.parametrize("kernels", only([("native",)], ENGINES))
def test_texts_match_transformers(stretched: Path, chats: list[Chat], kernels: str) -> None:
    first, second, several, _ = chats
    assert first.expected.prompt_ids == second.expected.prompt_ids
    assert first.expected.ids != second.expected.ids
    engine = make_engine(stretched, kernels, **LIMITS)
    for chunk_size in (1, 7, 128):
        texts = texts_of(engine, chats, chunk_sizes=[chunk_size])
        assert texts == [each.expected.ids for each in chats]
    texts_of(engine, [several])
    one, other, *_ = several.items
    for num_cached in (one.start, one.start + 3, one.end - 1, other.start, other.start + 9):
        (text,) = texts_of(engine, [several], num_cached=num_cached, chunk_sizes=[1000, 5])
        assert text == several.expected.ids, num_cached


def test_an_image_may_lie_across_parts_of_the_keys(
    stretched: Path, oracle: StretchedReference
) -> None:
    """Native code joins the sums of 256 keys at a time."""
    engine = make_engine(stretched, "native", **LIMITS | {"max_model_len": 512})
    for num in (234, 240):
        found = chat(oracle, "x" * num, FIRST, SECOND, "?")
        assert any(each.start < 256 < each.end for each in found.items)
        for chunk_sizes in ([1000], [5]):
            assert texts_of(engine, [found], chunk_sizes=chunk_sizes) == [found.expected.ids]


@pytest.mark.parametrize("kernels", ENGINES)
def test_texts_match_transformers_under_the_scheduler(
    stretched: Path, chats: list[Chat], kernels: str
) -> None:
    """With prefix hits, choices, and little more room in a step than for an image."""
    few = LIMITS | {"max_num_batched_tokens": NUM_TOKENS + 5}
    engine = make_engine(stretched, kernels, **few)
    wanted = [*chats, chats[2], chats[0]] * 2
    found = scheduled.run(engine, wanted, [GREEDY] * len(wanted))
    assert found.texts == [each.expected.ids for each in wanted]
    assert found.num_hits > 0


def test_a_crowd_changes_no_bit(stretched: Path, chats: list[Chat]) -> None:
    """Of logprobs, which transformers' rounding differs in."""
    engine = make_engine(stretched, "native", **LIMITS)
    params = replace(GREEDY, logprobs=1)
    alone = [scheduled.run(engine, [each], [params]) for each in chats]
    crowd = scheduled.run(engine, [*chats, *chats], [params] * 8)
    for number, each in enumerate(alone):
        for place in (number, number + 4):
            np.testing.assert_array_equal(crowd.logprobs[place], each.logprobs[0])


def test_a_step_that_ends_in_an_image_is_refused(stretched: Path, chats: list[Chat]) -> None:
    engine = make_engine(stretched, "torch", **LIMITS)
    engine.capacity = replace(engine.capacity, whole_media=(), media=("image",))
    with pytest.raises(ValueError, match="within an item from"):
        texts_of(engine, [chats[0]], chunk_sizes=[chats[0].items[0].start + 3])


def test_a_step_has_room_for_an_image(stretched: Path) -> None:
    few = LIMITS | {"max_num_batched_tokens": NUM_TOKENS + 2}
    with pytest.raises(ConfigError, match=r"max-num-batched-tokens: 18: .*19 or more are needed"):
        make_engine(stretched, "torch", **few)
    make_engine(stretched, "torch", **few, language_model_only=True)


def test_features_match_the_whole_model(stretched: Path, oracle: StretchedReference) -> None:
    inputs = oracle.images(images=[FIRST], return_tensors="pt")
    whole = AutoModelForImageTextToText.from_pretrained(stretched, dtype=torch.float32).eval()
    with torch.inference_mode():
        (expected,) = whole.get_image_features(inputs["pixel_values"]).pooler_output
    found = Tower(stretched, torch.float32).features(np.asarray(FIRST)[None])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    sizes = Sizes(stretched, torch.float32)
    assert (sizes.pixels_of_patch, sizes.patches_of_token) == (7**2, 4)


def test_older_names_of_tensors_are_read(
    stretched: Path, tmp_path: Path, chats: list[Chat]
) -> None:
    shutil.copytree(stretched, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in tensors}
    renamed = {names[name]: tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    engine = make_engine(tmp_path, "torch", **LIMITS)
    assert texts_of(engine, chats[:1]) == [chats[0].expected.ids]


def test_a_config_may_omit_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_model_config(tmp_path)
    assert (found.vocab_size, found.num_attention_heads, found.num_key_value_heads) == (
        262_208,
        8,
        4,
    )
    assert (found.head_dim, found.max_position_embeddings) == (256, 131_072)
