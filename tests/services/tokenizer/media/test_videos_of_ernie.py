"""Frames, their stamps, sizes and positions of ERNIE-4.5-VL's videos, as by transformers'
processor."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.tokenizer.media.reader_messages import Targets
from services.tokenizer.media.reading import MediaReading, media_for
from services.tokenizer.media.upright import draw
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError
from shared.media.families import read_family
from shared.media.family import Family, Film, VideoLimits, Videos
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.messages import Failed, Item, MediumKind
from tests.media.checkpoints import MAX_LEN, MEDIA, preprocessor, publish_ernie
from tests.media.pictures import picture
from tests.media.references import Clip, Reference
from tests.media.videos import decoded, encoded, metadata, needs_av, processor_of, scene, stamped
from tests.services.tokenizer.media.conftest import on_loop_of_module
from tests.services.tokenizer.media.files import file_of
from tests.services.tokenizer.media.test_requests import (
    Tokenizer,
    chat,
    image,
    text,
    tokenizer,
    user,
)
from tests.services.tokenizer.media.test_videos import array, check, listed, media, video

FPS = 4.0
FRAMES = scene(1, 13, 84, 112)  # of whole tokens
SAME = [HealthCheck.function_scoped_fixture]  # fixtures do not change between examples
MANY = settings(max_examples=50, deadline=None, suppress_health_check=SAME)

assert tokenizer  # a fixture
pytestmark = pytest.mark.parametrize("checkpoint", ["ernie4.5-vl"], indirect=True, scope="session")


@pytest.fixture
def family(checkpoint: Path) -> Family:
    found = read_family(checkpoint)
    assert found is not None
    return found


@pytest.fixture
def videos(family: Family) -> Videos:
    assert family.videos is not None
    return family.videos


@pytest.fixture(scope="module")
def processor() -> Any:
    return processor_of("ernie4_5_vl_moe").Ernie4_5_VLMoeVideoProcessor


@MANY
@given(
    total=st.integers(1, 40) | st.integers(1, 400_000),
    fps=st.sampled_from([24.0, 25.0, 30.0, 30000 / 1001, 40.0]) | st.floats(0.1, 120),
    asked=st.none() | st.floats(0.01, 60) | st.integers(1, 400),
    bounds=st.tuples(st.integers(1, 40), st.integers(40, 180)),
)
@example(total=400_000, fps=30.0, asked=None, bounds=(16, 180))
@example(total=1, fps=30.0, asked=2.0, bounds=(16, 180))
def test_frames_and_stamps_match_transformers(
    videos: Videos,
    processor: Any,
    total: int,
    fps: float,
    asked: float | None,
    bounds: tuple[int, int],
) -> None:
    """Without a number, every frame is wanted."""
    least, most = bounds
    film, limits = Film(64, 64, total, fps), VideoLimits(1, 2, float("inf"), None, least, most)
    name = "num_frames" if isinstance(asked, int) else "fps"
    given: dict[str, Any] = {} if asked is None else {name: asked}
    limits = limits._replace(**given)
    found_by = SimpleNamespace(num_frames=None, min_frames=least, max_frames=most)
    described = metadata(total, fps)
    try:
        expected = processor.sample_frames(found_by, described, **given)
    except ValueError:
        with pytest.raises(ValueError, match=f"has {total} frames; num_frames is {asked}"):
            videos.frames(film, limits)
        return
    found = videos.frames(film, limits)
    num = len(found)
    # Its step in float32 may give one more at the end.
    assert expected[num:].tolist() in ([], [total], [total - 1])
    wanted = min(max(total / fps * limits.fps, least), most, total)
    places = np.arange(num) * (total / (limits.num_frames or wanted))
    is_close = np.abs(places - places.round()) < 1e-2  # rounded by vectors of the processor
    assert (np.abs(found - expected[:num].numpy()) <= is_close).all()
    assert 0 == found[0] <= found.max() < total
    assert [*videos.times(film, found, 1)] == [*range(-(-num // 2))]
    described.frames_indices = torch.tensor(found).int()
    stamps = [processor._convert_timestamp(None, each) for each in described.timestamps]
    assert videos.stamps(film, found) == stamps


@pytest.mark.parametrize("size", [(10, 10), (84, 56), (333, 500), (1280, 720)])
def test_stamps_are_drawn_as_by_transformers(
    videos: Videos, size: tuple[int, int], tmp_path: Path
) -> None:
    """Without the file, in Pillow's font."""
    plain = picture(3, *size)
    found, other = plain.copy(), plain.copy()
    (expected,) = stamped(videos.font, [plain], FPS)
    stamps = ["no", "time: 00:00:00.00"]
    for each, font in ((found, videos.font), (other, str(tmp_path / "missing.ttf"))):
        draw(each, Targets((1, 1), (1, 1), stamps=stamps, font=font), 1)
    assert found.tobytes() == expected.tobytes()
    assert plain.tobytes() not in (found.tobytes(), other.tobytes())


@MANY
@given(width=st.integers(1, 2000), height=st.integers(1, 2000), num=st.integers(1, 40))
def test_sizes_match_transformers(
    videos: Videos, transformers: Reference, width: int, height: int, num: int
) -> None:
    resize: Any = vars(processor_of("ernie4_5_vl_moe"))["smart_resize"]
    film, limits = Film(width, height, num, 25.0), videos.limits
    try:
        expected = resize(height, width, transformers.side, *limits[:2])
    except ValueError:
        expected = None
    if expected is None or min(width, height) < 10:
        with pytest.raises(ValueError, match=r"200 times|videos with sides of 10 or more"):
            videos.fit(film, num, limits)
        return
    fit = videos.fit(film, num, limits)
    assert fit.size == (2, *expected)
    assert fit.num_tokens == expected[0] * expected[1] // transformers.side**2


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[MediumKind, int, int, int]]:
    """Kind, groups, rows, columns."""
    sides = st.integers(1, 9)
    kinds: tuple[MediumKind, MediumKind] = ("image", "video")
    images, videos = map(st.just, kinds)
    parts = st.tuples(images, st.just(1), sides, sides) | st.tuples(
        videos, st.integers(1, 30), sides, sides
    )
    return draw(st.lists(parts, max_size=4))


@settings(MANY, max_examples=100)
@given(layout=layouts(), texts=st.lists(st.integers(1, 6), min_size=5, max_size=5))
def test_positions_match_transformers(
    family: Family,
    transformers: Reference,
    layout: list[tuple[MediumKind, int, int, int]],
    texts: list[int],
) -> None:
    items, kinds = [], [0] * texts[0]
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    for (kind, groups, rows, columns), after in zip(layout, texts[1:], strict=False):
        num, frames = rows * columns, 1 + (kind == "video")
        for time in range(groups):
            size = frames, transformers.side * rows, transformers.side * columns
            place = {"start": len(kinds), "num_tokens": num, "time": time}
            items.append(Item(kind=kind, size=size, digest=b"", **place))
            kinds += [frames] * num
        grids[kind].append([groups * frames, 2 * rows, 2 * columns])
        kinds += [0] * after
    of_kinds = torch.tensor([kinds])
    given_grids = {f"{kind}_grid_thw": torch.tensor(found) for kind, found in grids.items()}
    index = transformers.model.model.get_rope_index
    expected, delta = index(of_kinds, of_kinds, **given_grids)
    found = family.positions(items, len(kinds))
    assert found.tolist() == expected[:, 0].tolist()
    assert found.max() + 1 - len(kinds) == int(delta) <= 0
    assert (found <= np.arange(len(kinds))).all()


@needs_av
@on_loop_of_module
async def test_a_file_is_read_whole_with_stamps(
    tokenizer: Tokenizer, transformers: Reference, videos: Videos
) -> None:
    """13 frames, of which the last one comes twice."""
    file = encoded(FRAMES, FPS)
    frames = stamped(videos.font, decoded(file), FPS)
    messages = [user(text("Describe it."), video(0))]
    found = await tokenizer.ask(*chat(messages, 0, media=media("video")), array(file))
    check(found, transformers, messages, Clip([*frames, frames[-1]]))
    assert [item.time for item in found[0].items] == [*range(7)]
    asked = chat(messages, 0, media=media("video"), media_options='{"num_frames": 4}')
    found = await tokenizer.ask(*asked, array(file))
    check(found, transformers, messages, Clip([frames[number] for number in (0, 3, 6, 9)]))


@on_loop_of_module
async def test_listed_frames_have_the_times_of_their_rate(
    tokenizer: Tokenizer, transformers: Reference, videos: Videos
) -> None:
    """24 frames a second, as transformers takes it, unless the request says another number."""
    messages = [user(video(0), text(" then "), video(1))]
    files = listed(FRAMES[:5]), listed(FRAMES[5:7])
    for options, fps in (("", 24.0), ('{"fps": 0.01}', 0.01)):
        asked = chat(messages, 0, media=media("video", "video"), media_options=options)
        found = await tokenizer.ask(*asked, *files)
        first, second = (stamped(videos.font, part, fps) for part in (FRAMES[:5], FRAMES[5:7]))
        check(found, transformers, messages, Clip([*first, first[-1]]), Clip(second))
        assert [item.time for item in found[0].items] == [0, 1, 2, 0]


@on_loop_of_module
async def test_frames_too_small_for_a_stamp_are_refused(tokenizer: Tokenizer) -> None:
    asked = chat([user(video(0))], 0, media=media("video"))
    failed = await tokenizer.ask(*asked, listed([picture(1, 9, 90)] * 2))
    assert isinstance(failed, Failed)
    assert failed.message == (
        "video 0 is 9 x 90 pixels; the model takes videos with sides of 10 or more"
    )


@pytest.fixture
async def published(checkpoint: Path, tmp_path: Path):
    publish_ernie(checkpoint, tmp_path)
    (tmp_path / "Roboto-Regular.ttf").write_bytes((checkpoint / "Roboto-Regular.ttf").read_bytes())
    areas = {"min_pixels": 56 * 56, "max_pixels": 280 * 280}
    config = TokenizerConfig(model=str(tmp_path), mm_processor_kwargs=areas)
    model = TextModel(tmp_path, MAX_LEN, 263)
    reading = media_for(model, tmp_path, config)
    assert isinstance(reading, MediaReading)
    yield Tokenizer(model, reading)
    await reading.close()


async def test_images_and_videos_have_one_placeholder_as_published(
    published: Tokenizer, transformers: Reference, videos: Videos
) -> None:
    """In each order. Templates have texts for both."""
    frames, still = FRAMES[:4], picture(2, 84, 84)
    clip = Clip(stamped(videos.font, frames, 24.0))
    kinds = "video", "image"
    for parts in ((video(0), text("?"), image(1)), (image(1), text("?"), video(0))):
        asked = chat([user(*parts)], 0, media=media(*kinds))
        generate, (ids, _, *pixels) = await published.ask(*asked, listed(frames), file_of(still))
        prompt = transformers.tokenizer.apply_chat_template(
            [user(*parts)], tokenize=False, add_generation_prompt=True
        )
        wanted = transformers.inputs(prompt, [still], [clip])["input_ids"][0].numpy().copy()
        of_videos, of_images = transformers.tokenizer.convert_tokens_to_ids([MEDIA[3], MEDIA[2]])
        wanted[wanted == of_videos] = of_images
        assert ids.tolist() == wanted.tolist()
        by_digest = {
            item.digest: each.tobytes() for item, each in zip(generate.items, pixels, strict=True)
        }
        of_video = [item for item in generate.items if item.kind == "video"]
        pairs = [clip.frames[:2], clip.frames[2:]]
        expected = [b"".join(each.tobytes() for each in pair) for pair in pairs]
        assert [by_digest[item.digest] for item in of_video] == expected
        (of_image,) = (item for item in generate.items if item.kind == "image")
        assert by_digest[of_image.digest] == still.tobytes()


def test_limits_and_the_font_come_from_the_file_of_videos(checkpoint: Path, tmp_path: Path) -> None:
    def read() -> Videos:
        found = read_family(tmp_path)
        assert found is not None
        assert found.videos is not None
        return found.videos

    preprocessor(checkpoint, tmp_path)
    areas, font = (299 * 784, 1196 * 784), str(tmp_path / "Roboto-Regular.ttf")
    assert (*read().limits, read().font) == (*areas, 2.0, None, 16, 180, 24.0, font)
    file = tmp_path / "video_preprocessor_config.json"
    file.write_text("{}")
    assert (*read().limits, read().font) == (*areas, float("inf"), None, 16, 180, 24.0, font)
    given = {"fps": 3, "size": {"shortest_edge": 5, "longest_edge": 6}, "font": "folder/a.ttf"}
    file.write_text(json.dumps(given))
    assert (read().limits[:3], read().font) == ((5, 6, 3.0), str(tmp_path / "a.ttf"))
    file.write_text('{"draw_on_frames": false, "temporal_patch_size": 2}')
    assert read().font == ""
    assert read().stamps(Film(9, 9, 3, 1.0), np.arange(3)) == ()
    assert read().fit(Film(9, 9, 3, 1.0), 3, read().limits).size[0] == 2
    for wrong in (
        '"temporal_patch_size": 1',
        '"font": 3',
        '"draw_on_frames": 1',
        '"patch_size": 9',
    ):
        file.write_text("{" + wrong + "}")
        with pytest.raises(ConfigError, match=f"video_preprocessor_config.json: .*{wrong[1:5]}"):
            read()


def test_a_missing_font_is_in_the_log(
    checkpoint: Path, model: TextModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = TokenizerConfig(model=str(checkpoint))
    media_for(model, checkpoint, config)
    assert not caplog.records
    preprocessor(checkpoint, tmp_path)
    media_for(model, tmp_path, config)
    assert "Roboto-Regular.ttf is missing" in caplog.text
