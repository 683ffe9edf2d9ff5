"""Frames, times, sizes and prompts of Gemma 4's videos, as by transformers' processor."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma4 import image_processing_pil_gemma4 as theirs
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.video_utils import default_sample_indices_fn

from services.tokenizer.media.placeholders import Placeholder, ReadMedia, ReadMedium
from services.tokenizer.media.reading import MediaReading, media_for
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError, InvalidRequest
from shared.media.families import read_family
from shared.media.family import Film, VideoLimits, Videos
from shared.media.gemma4 import FilledRows
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.messages import MAX_MEDIA, Convert
from tests.media.checkpoints import MAX_LEN, VIDEO_FILE, nest
from tests.media.gemma4_checkpoints import (
    END,
    NUM_TOKENS,
    PATCH,
    POOL,
    SIDE,
    START,
    TOKEN,
    VIDEO,
    FilledReference,
    gemma4_reference,
    save_gemma4,
    save_unified,
)
from tests.media.pictures import picture
from tests.media.references import Clip
from tests.media.videos import decoded, encoded, metadata, needs_av, scene
from tests.services.tokenizer.media.files import file_of
from tests.services.tokenizer.media.test_requests import Tokenizer, chat, image, text, user
from tests.services.tokenizer.media.test_videos import array, listed, media, video

MANY = settings(max_examples=80, deadline=None)
WIDTH, HEIGHT = 10 * SIDE, 7 * SIDE  # of whole tokens


@pytest.fixture(scope="module", params=[save_gemma4, save_unified], ids=["gemma4", "unified"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    request.param(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> FilledReference:
    return gemma4_reference(folder)


@pytest.fixture(scope="module")
def videos(folder: Path) -> Videos:
    found = read_family(folder)
    assert found is not None
    assert found.kinds == ("image", "video")
    assert found.videos is not None
    return found.videos


@pytest.fixture
async def tokenizer(folder: Path) -> AsyncIterator[Tokenizer]:
    model = TextModel(folder, MAX_LEN, 264)
    reading = media_for(model, folder, TokenizerConfig(model=str(folder)))
    assert isinstance(reading, MediaReading)
    yield Tokenizer(model, reading)
    await reading.close()


@MANY
@given(
    total=st.integers(1, 60) | st.integers(1, 30_000),
    fps=st.sampled_from([24.0, 25.0, 30000 / 1001]) | st.floats(0.1, 120),
    asked=st.integers(1, 60) | st.floats(0.001, 60),
)
def test_frames_and_times_match_transformers(
    videos: Videos, total: int, fps: float, asked: float
) -> None:
    """A film with fewer frames than wanted, which transformers refuses, has all of them."""
    film, about = Film(64, 64, total, fps), metadata(total, fps)
    name = "num_frames" if isinstance(asked, int) else "fps"
    wanted: Any = {"num_frames": None} | {name: asked}
    limits = videos.limits._replace(**wanted)
    try:
        expected = default_sample_indices_fn(about, **{name: asked}).tolist()
    except ValueError:
        expected = [*range(total)]
    if len(expected) > MAX_MEDIA:
        with pytest.raises(ValueError, match=f"has {len(expected)} chosen frames .* limit is 1024"):
            videos.frames(film, limits)
        return
    frames = videos.frames(film, limits)
    assert frames.tolist() == expected
    about.frames_indices = frames
    texts: Any = SimpleNamespace(boi_token=START, video_token=VIDEO, eoi_token=END)
    found_by = {"num_soft_tokens_per_video": [1], "video_metadata": [about]}
    first, *others = videos.labels(film, frames)
    found = first + f"00:00 {START}" + "".join(VIDEO + other for other in others) + VIDEO + END
    assert found == Gemma4Processor.replace_video_token(texts, found_by, 0)
    assert videos.times(film, frames, 4) == [0] * len(frames)


@MANY
@given(width=st.integers(1, 4000), height=st.integers(1, 4000))
def test_sizes_match_transformers(videos: Videos, width: int, height: int) -> None:
    film = Film(width, height, 9, 25.0)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="one side may be 200 times the other"):
            videos.fit(film, 9, videos.limits)
        return
    resize = theirs.get_aspect_ratio_preserving_size
    expected = resize(height, width, PATCH, NUM_TOKENS * POOL**2, POOL)
    size, num_tokens, *_ = videos.fit(film, 9, videos.limits)
    assert size == (1, *expected)
    assert num_tokens == np.prod(expected) // SIDE**2


async def test_a_prompt_is_that_of_transformers(
    tokenizer: Tokenizer, oracle: FilledReference
) -> None:
    """Lists of frames, one in 35 seconds, next to an image; words around them are joined."""
    first, second = scene(1, 3, WIDTH, HEIGHT), scene(2, 2, HEIGHT, WIDTH)
    one = picture(3, WIDTH, HEIGHT)
    parts = text("Which?"), video(0), text("or"), image(1), text(" or "), video(2), text("9")
    messages = [user(*parts)]
    about: dict[str, Any] = {
        "media": media("video", "image", "video"),
        "media_options": f'{{"fps": {1 / 35}}}',
    }
    asked, files = chat(messages, 0, **about), (listed(first), file_of(one), listed(second))
    generate, (ids, _, *pixels) = await tokenizer.ask(*asked, *files)
    clips = [Clip(first, 35.0), Clip(second, 35.0)]
    prompt = oracle.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    wanted = oracle.inputs(prompt, [one], clips)
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    kinds = wanted["mm_token_type_ids"][0].tolist()
    for item in generate.items:
        assert {*kinds[item.start : item.end]} == {2 if item.kind == "video" else 1}
    assert len(generate.items) == 6
    frames = [*first, one, *second]
    assert [each.tobytes() for each in pixels] == [each.tobytes() for each in frames]
    counted = Convert("c", "chat", False, **about)
    assert (await tokenizer.convert(counted, asked[1], *files)).tolist() == ids.tolist()
    again = chat([], 0, kind="ids", **about)[0]
    replay, _ = await tokenizer.ask(again, ids, asked[2], *files)
    assert replay.items == generate.items
    to_text = Convert("r", "chat", False, to="text", **about)
    written = (await tokenizer.convert(to_text, asked[1], *files)).tobytes().decode()
    assert f"Which?00:00 {START}{VIDEO}{END}or{START}{TOKEN}{END} or 00:00" in written


@needs_av
async def test_frames_of_a_file_are_chosen(tokenizer: Tokenizer, oracle: FilledReference) -> None:
    file = encoded(scene(1, 13, WIDTH, HEIGHT), 0.5)
    messages = [user(text("Describe it."), video(0))]
    asked = chat(messages, 0, media=media("video"), media_options='{"num_frames": 3}')
    generate, (ids, _, *pixels) = await tokenizer.ask(*asked, array(file))
    frames = [decoded(file)[number] for number in (0, 4, 8)]
    prompt = oracle.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    wanted = oracle.inputs(prompt, [], [Clip(frames, 8.0)])
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    assert [each.tobytes() for each in pixels] == [each.tobytes() for each in frames]
    assert [item.size for item in generate.items] == [(1, HEIGHT, WIDTH)] * 3


def copied(folder: Path, copy: Path, **of_videos: Any) -> VideoLimits | None:
    """The limits of videos with a file of these."""
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    if of_videos:
        (copy / VIDEO_FILE).write_text(json.dumps(of_videos))
    found = read_family(copy)
    assert found is not None
    return None if found.videos is None else found.videos.limits


def test_limits_come_from_the_files_that_transformers_reads(folder: Path, tmp_path: Path) -> None:
    """Without a file of videos, that of images says how many tokens a frame has."""
    area = 70 * SIDE**2
    for of_videos, expected in (
        ({}, (area, 32)),
        ({"max_soft_tokens": 140, "num_frames": 8}, (2 * area, 8)),
        ({"do_sample_frames": True}, (area, 32)),
        ({"fps": 1.0, "num_frames": None}, (area, None)),
    ):
        limits = copied(folder, tmp_path, **of_videos)
        assert limits is not None
        assert (limits.max_pixels, limits.num_frames) == expected
    assert limits.fps == 1.0
    nest(tmp_path)
    nested = read_family(tmp_path)
    assert nested is not None
    assert nested.videos is not None
    assert nested.videos.limits == limits


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_soft_tokens": 71},
        {"max_soft_tokens": "many"},
        {"image_mean": [0.5, 0, 0]},
        {"image_std": [1, 1, 2]},
        {"patch_size": PATCH + 1},
        {"pooling_kernel_size": POOL + 1},
        {"do_resize": False},
        {"resample": 2},
    ],
    ids=str,
)
def test_other_frames_are_refused(folder: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{VIDEO_FILE}: .*{next(iter(wrong))}"):
        copied(folder, tmp_path, **wrong)


def test_a_tokenizer_without_the_token_of_videos_reads_images(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    added = [each for each in tokenizer["added_tokens"] if each["content"] != VIDEO]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": added}))
    found = read_family(tmp_path)
    assert isinstance(found, FilledRows)
    assert found.kinds == ("image",)
    assert [*found.marks] == ["image"]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (f"a {TOKEN} {VIDEO} {VIDEO}", "writes <|video|> 2 times for 1 videos"),
        (f"{VIDEO}", "writes <|image|> 0 times for 1 images"),
        (f"{VIDEO}{TOKEN}", "writes images and videos in another order"),
    ],
)
def test_a_template_that_writes_other_media_is_refused(
    folder: Path, written: str, message: str
) -> None:
    family = read_family(folder)
    assert isinstance(family, FilledRows)
    ids = np.zeros(1, np.int32)
    read = [ReadMedium("image", ids, ()), ReadMedium("video", ids, ())]
    placeholders = [Placeholder(1, TOKEN, "image"), Placeholder(2, VIDEO, "video")]
    found = ReadMedia(read, placeholders, MAX_LEN, marked=family)
    assert (
        found.written(f"{TOKEN}{VIDEO}", [0, 1]) == f"{START}{TOKEN}{END}00:00 {START}{VIDEO}{END}"
    )
    with pytest.raises(InvalidRequest) as error:
        found.written(written, [0, 1])
    assert message in str(error.value)
