"""Images and videos of Gemma 4: towers and texts against transformers. In the larger models, tokens
of an image see each other in layers with a window; the smaller ones have inputs of layers, and the
one of 12B has no tower."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForImageTextToText

from benchmarks.harness.engines import ENGINES, make_engine
from services.worker.media.preprocessors import read_preprocessor
from services.worker.media.tower import Sizes, Tower
from shared.errors import ConfigError
from tests.media.checkpoints import nest, preprocessor
from tests.media.gemma4_checkpoints import (
    NUM_TOKENS,
    PATCH,
    POOL,
    SMALL,
    WHOLE,
    FilledReference,
    gemma4_reference,
    save_gemma4,
    save_unified,
)
from tests.media.references import Clip
from tests.media.videos import scene
from tests.services.worker.media import scheduled
from tests.services.worker.media.prompts import GREEDY, Chat, chat, texts_of

LIMITS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 5, "max_num_batched_tokens": 1024}
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
TEXTS: dict[str, dict[str, Any]] = {
    "whole": WHOLE,
    "small": SMALL,
    "both": {**WHOLE, **SMALL, "sliding_window": 90},
    "experts": {**WHOLE, **EXPERTS},
}
UNIFIED = "unified"
SLOW = ("both", "experts")
each_folder = pytest.mark.parametrize(
    "folder",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in (*TEXTS, UNIFIED)
    ],
    indirect=True,
    scope="module",
)
one_folder = pytest.mark.parametrize("folder", ["whole"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    if request.param == UNIFIED:
        save_unified(folder)
    else:
        save_gemma4(folder, **TEXTS[request.param])
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> FilledReference:
    return gemma4_reference(folder)


@pytest.fixture(scope="module")
def chats(oracle: FilledReference) -> list[Chat]:
    first, second, third = (oracle.picture(seed, 10, 7) for seed in range(3))
    high = oracle.picture(3, 5, 14)
    return [
        chat(oracle, "Describe it. ", first, "In one word."),
        chat(oracle, "Describe it. ", second, "In one word."),
        chat(oracle, first, high, "?", third),
        chat(oracle, "No picture at all."),
        chat(oracle, "Is ", Clip(scene(5, 3, 120, 84), 35.0), " like ", second, "?"),
    ]


@pytest.mark.parametrize("chunk_size", [7, 1, 1000])
@pytest.mark.parametrize("kernels", ENGINES)
@each_folder
def test_texts_match_transformers(
    folder: Path, chats: list[Chat], kernels: str, chunk_size: int
) -> None:
    first, second, *_ = chats
    assert first.expected.prompt_ids == second.expected.prompt_ids
    assert first.expected.ids != second.expected.ids
    engine = make_engine(folder, kernels, **LIMITS)
    texts = texts_of(engine, chats, chunk_sizes=[chunk_size])
    assert texts == [each.expected.ids for each in chats]


@pytest.mark.parametrize("kernels", ENGINES)
@each_folder
def test_a_hit_may_end_in_an_image(folder: Path, chats: list[Chat], kernels: str) -> None:
    several = chats[2]
    engine = make_engine(folder, kernels, **LIMITS)
    texts_of(engine, [several])
    one, other, *_ = several.items
    for num_cached in (one.start, one.start + 3, other.end - 1):
        (text,) = texts_of(engine, [several], num_cached=num_cached, chunk_sizes=[1000, 5])
        assert text == several.expected.ids, num_cached


@pytest.mark.parametrize("kernels", ENGINES)
@each_folder
def test_texts_match_transformers_under_the_scheduler(
    folder: Path, chats: list[Chat], kernels: str
) -> None:
    """With prefix hits, and little more room in a step than for an image."""
    few = LIMITS | {"max_num_batched_tokens": NUM_TOKENS + 5}
    engine = make_engine(folder, kernels, **few)
    wanted = [*chats, *chats]
    found = scheduled.run(engine, wanted, [GREEDY] * len(wanted))
    assert found.texts == [each.expected.ids for each in wanted]
    assert found.num_hits > 0


@each_folder
def test_a_crowd_changes_no_bit(folder: Path, chats: list[Chat]) -> None:
    """Of logprobs, which transformers' rounding differs in."""
    engine = make_engine(folder, "native", **LIMITS)
    params = replace(GREEDY, logprobs=1)
    alone = [scheduled.run(engine, [each], [params]) for each in chats]
    crowd = scheduled.run(engine, [*chats, *chats], [params] * 2 * len(chats))
    assert crowd.texts == 2 * [each.expected.ids for each in chats]
    for number, each in enumerate(alone):
        for place in (number, number + len(chats)):
            np.testing.assert_array_equal(crowd.logprobs[place], each.logprobs[0])


@pytest.mark.slow
@each_folder
def test_texts_may_be_quantized(folder: Path, chats: list[Chat]) -> None:
    """Native code gives the texts of torch's operators with the same codes; pictures stay whole."""
    options = LIMITS | {"quantization": "wint8", "embedding_quantization": "wint8"}
    native, by_torch = (
        texts_of(make_engine(folder, kernels, **options), chats) for kernels in ("native", "torch")
    )
    assert native == by_torch
    assert native[0] != native[1]


@each_folder
def test_features_match_the_whole_model(folder: Path, oracle: FilledReference) -> None:
    """transformers adds patches without content, so its sums have another order."""
    one = oracle.picture(4, 14, 5)
    given = oracle.patches([one])
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        places = given["image_position_ids"]
        (expected,) = whole.get_image_features(given["pixel_values"], places).pooler_output
    tower = Tower(folder, torch.float32)
    assert not any("audio" in name for name, _ in tower.model.named_parameters())
    found = tower.features(np.asarray(one)[None])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    sizes = Sizes(folder, torch.float32)
    assert (sizes.pixels_of_patch, sizes.patches_of_token) == (PATCH**2, POOL**2)


@one_folder
def test_a_published_folder_has_the_file_of_the_processor(
    folder: Path, tmp_path: Path, oracle: FilledReference, chats: list[Chat]
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    nest(tmp_path)
    engine = make_engine(tmp_path, "torch", **LIMITS)
    assert texts_of(engine, chats[:1]) == [chats[0].expected.ids]


@one_folder
def test_texts_need_no_tower(folder: Path, chats: list[Chat]) -> None:
    engine = make_engine(folder, "torch", **LIMITS, language_model_only=True)
    assert not engine.additions
    assert texts_of(engine, chats[3:4]) == [chats[3].expected.ids]


@each_folder
def test_a_step_has_room_for_an_image(folder: Path, oracle: FilledReference) -> None:
    few = LIMITS | {"max_num_batched_tokens": NUM_TOKENS + 2}
    if oracle.model.config.text_config.use_bidirectional_attention is None:
        make_engine(folder, "torch", **few)
        return
    with pytest.raises(ConfigError, match=r"max-num-batched-tokens: 72: .*74 or more are needed"):
        make_engine(folder, "torch", **few)


@one_folder
def test_other_pixels_and_patches_are_refused(folder: Path, tmp_path: Path) -> None:
    for name, value in (
        ("do_normalize", True),
        ("do_rescale", False),
        ("patch_size", PATCH + 1),
        ("pooling_kernel_size", POOL + 1),
    ):
        preprocessor(folder, tmp_path, **{name: value})
        with pytest.raises(ConfigError, match=rf"preprocessor_config\.json: .*{name}"):
            read_preprocessor(tmp_path)
