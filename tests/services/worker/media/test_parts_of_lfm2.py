"""Images of LFM2-VL, each of which is several items: towers and texts against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.engines import ENGINES, make_engine
from services.worker.media.tower import Sizes, Tower
from tests.media.lfm_checkpoints import PartsReference, parts_reference, save_lfm2
from tests.media.pictures import picture
from tests.selection import only
from tests.services.worker.media.prompts import Chat, chat, texts_of

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512}
FIRST, SECOND = picture(1, 100, 50), picture(2, 100, 50)
SMALL = picture(3, 40, 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm2")
    save_lfm2(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PartsReference:
    return parts_reference(folder)


@pytest.fixture(scope="module")
def chats(oracle: PartsReference) -> list[Chat]:
    return [
        chat(oracle, "Describe it. ", FIRST, "In one word."),
        chat(oracle, "Describe it. ", SECOND, "In one word."),
        chat(oracle, FIRST, SMALL, "?"),
        chat(oracle, "No picture at all."),
    ]


@pytest.mark.parametrize("kernels", only([("native",)], ENGINES))
def test_texts_match_transformers(folder: Path, chats: list[Chat], kernels: str) -> None:
    first, second, both, _ = chats
    assert first.expected.prompt_ids == second.expected.prompt_ids
    assert first.expected.ids != second.expected.ids
    assert [len(each.items) for each in chats] == [3, 3, 4, 0]
    engine = make_engine(folder, kernels, **LIMITS)
    for chunk_size in (1, 7, 128):
        texts = texts_of(engine, chats, chunk_sizes=[chunk_size])
        assert texts == [each.expected.ids for each in chats]
    texts_of(engine, [both])
    tile, *_, view, small = both.items
    for num_cached in (tile.start, tile.start + 3, tile.end, view.start - 1, small.end):
        (text,) = texts_of(engine, [both], num_cached=num_cached, chunk_sizes=[1000, 5])
        assert text == both.expected.ids


def test_features_match_the_whole_model(folder: Path, oracle: PartsReference) -> None:
    """Patches that are masked change nothing."""
    frames = [frame for each in (FIRST, SMALL) for (frame,) in oracle.items(each)]
    inputs = oracle.pixels_of(frames)
    with torch.inference_mode():
        expected = torch.cat(oracle.model.get_image_features(**inputs).pooler_output)
    tower = Tower(folder, torch.float32)
    found = torch.cat([tower.features(np.asarray(frame)[None]) for frame in frames])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    held = [*tower.model.parameters(), *tower.model.buffers()]
    sizes = Sizes(folder, torch.float32)
    assert sizes.weights == sum(each.nbytes for each in held)
    assert (sizes.pixels_of_patch, sizes.patches_of_token) == (8**2, 4)
