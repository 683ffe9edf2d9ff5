"""Texts about videos against transformers, token by token."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.engines import make_engine
from services.tokenizer.media.reader_messages import Targets
from services.tokenizer.media.upright import draw
from services.worker.backends.native import NativeLM
from tests.media.references import Clip, Reference
from tests.media.videos import scene
from tests.services.worker.driver import model_of
from tests.services.worker.media.prompts import KERNELS, Chat, chat, texts_of

LIMITS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 512}


QWEN3, ERNIE = (pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-vl", "ernie4.5-vl"))
pytestmark = pytest.mark.parametrize(
    "folder", ["qwen2.5-vl", QWEN3, ERNIE], indirect=True, scope="session"
)


def clip(oracle: Reference, seed: int, *sides: int, seconds: float) -> Clip:
    """Its frames have whole tokens. Qwen3-VL reads its times, and ERNIE-4.5-VL sees them."""
    frames, kind = scene(seed, *sides), oracle.model.config.model_type
    if kind == "ernie4_5_vl_moe":
        for number, frame in enumerate(frames):
            draw(frame, Targets((0, 0), (0, 0), stamps=[f"{number / 2 * seconds:05.2f}"]), 0)
    if kind != "qwen3_vl":
        return Clip(frames, seconds)
    labels = [f"<{seconds * (number + 0.25):.1f} seconds>" for number in range(len(frames) // 2)]
    return Clip(frames, labels=labels)


@pytest.fixture(scope="session")
def chats(oracle: Reference) -> dict[str, Chat]:
    side = oracle.side
    sides = 6, 3 * side, 2 * side
    slow, fast = (clip(oracle, 1, *sides, seconds=seconds) for seconds in (2.6, 0.3))
    short = clip(oracle, 2, 2, 5 * side, side, seconds=1.0)
    image = oracle.picture(3, 2, 4)
    return {
        "slow": chat(oracle, "Describe it. ", slow, "In one word."),
        "fast": chat(oracle, "Describe it. ", fast, "In one word."),
        "video alone": chat(oracle, short),
        "video and image": chat(oracle, slow, " and ", image, ": which is longer?"),
        "image and videos": chat(oracle, image, fast, slow, "Which is longer?"),
    }


@pytest.fixture(scope="session", params=KERNELS)
def engine(request: pytest.FixtureRequest, folder: Path) -> Any:
    made = make_engine(folder, request.param, **LIMITS)
    assert isinstance(model_of(made), NativeLM) == (request.param == "native")
    assert made.capacity.more_media == ("video",)
    return made


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_a_text_is_that_of_transformers(
    engine: Any, chats: dict[str, Chat], chunk_size: int
) -> None:
    for name, found in chats.items():
        (text,) = texts_of(engine, [found], chunk_sizes=[chunk_size])
        assert text == found.expected.ids, name


def test_texts_differ_by_the_times_alone(chats: dict[str, Chat]) -> None:
    slow, fast = chats["slow"], chats["fast"]
    are_labelled = slow.expected.prompt_ids != fast.expected.prompt_ids
    assert are_labelled == (slow.items[-1].time == 0)
    assert slow.expected.ids != fast.expected.ids


def test_prompts_side_by_side(engine: Any, chats: dict[str, Chat]) -> None:
    texts = texts_of(engine, [*chats.values()], chunk_sizes=[30, 11, 3])
    assert texts == [each.expected.ids for each in chats.values()]


def test_a_cache_of_prefixes_may_end_anywhere(engine: Any, chats: dict[str, Chat]) -> None:
    """Within a group of frames, between two, and after the video."""
    found = chats["video and image"]
    first, second, third, image = found.items
    for num_cached in (first.start + 4, second.start, second.start + 3, third.end, image.end + 1):
        texts_of(engine, [found])
        (text,) = texts_of(engine, [found], num_cached=num_cached, chunk_sizes=[1000, 5])
        assert text == found.expected.ids, num_cached
