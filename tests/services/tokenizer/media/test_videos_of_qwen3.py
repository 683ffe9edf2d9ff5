"""Frames, sizes, labels and positions of Qwen3-VL's videos are those of transformers' processor."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from shared.media.families import read_family
from shared.media.family import Family, Film, VideoLimits, Videos
from shared.wire.messages import Convert, Item
from tests.media.checkpoints import MAX_LEN
from tests.media.references import Clip, Reference
from tests.media.videos import metadata, processor_of, scene
from tests.services.tokenizer.media.conftest import on_loop_of_module
from tests.services.tokenizer.media.test_requests import Tokenizer, chat, text, tokenizer, user
from tests.services.tokenizer.media.test_videos import check, listed, media, video

# Fixtures do not change between examples.
SAME = [HealthCheck.function_scoped_fixture]
MANY = settings(max_examples=60, deadline=None, suppress_health_check=SAME)
SIDES = st.integers(1, 60) | st.integers(1, 3000)

assert tokenizer  # a fixture
pytestmark = pytest.mark.parametrize("checkpoint", ["qwen3-vl"], indirect=True, scope="session")


@pytest.fixture
def family(checkpoint: Path) -> Family:
    found = read_family(checkpoint)
    assert found is not None
    return found


@pytest.fixture
def videos(family: Family) -> Videos:
    assert family.videos is not None
    return family.videos


@MANY
@given(
    total=st.integers(2, 40) | st.integers(2, 30_000),
    fps=st.sampled_from([24.0, 25.0, 30.0, 30000 / 1001]) | st.floats(0.1, 120),
    wanted_fps=st.sampled_from([2.0, 1.0, 0.2]) | st.floats(0.01, 60),
    num_frames=st.none() | st.integers(2, 900),
    bounds=st.tuples(st.integers(2, 40), st.integers(40, 768)),
)
def test_frames_and_labels_match_transformers(
    videos: Videos,
    total: int,
    fps: float,
    wanted_fps: float,
    num_frames: int | None,
    bounds: tuple[int, int],
) -> None:
    sample: Any = processor_of("qwen3_vl").Qwen3VLVideoProcessor.sample_frames
    processor = SimpleNamespace(fps=2, min_frames=bounds[0], max_frames=bounds[1])
    asked = {"fps": wanted_fps} if num_frames is None else {"num_frames": num_frames}
    expected = sample(processor, metadata(total, fps), **asked)
    film, limits = Film(64, 64, total, fps), VideoLimits(1, 2, wanted_fps, num_frames, *bounds)
    frames = videos.frames(film, limits)
    assert frames.tolist() == expected.tolist()
    calculate: Any = Qwen3VLProcessor._calculate_timestamps
    times = calculate(None, expected.tolist(), fps, 2)
    assert videos.labels(film, frames) == [f"<{each:.1f} seconds>" for each in times]
    assert videos.times(film, frames, 4) == [0] * len(times)


@MANY
@given(
    width=SIDES,
    height=SIDES,
    num=st.integers(1, 60),
    areas=st.tuples(st.integers(1, 3_000_000), st.integers(1, 60_000_000)),
)
@example(width=4000, height=10, num=4, areas=(4096, 25_165_824))
def test_sizes_match_transformers(
    videos: Videos,
    transformers: Reference,
    width: int,
    height: int,
    num: int,
    areas: tuple[int, int],
) -> None:
    resize: Any = processor_of("qwen3_vl").smart_resize
    least, most = min(areas), max(areas)
    film = Film(width, height, num, 25.0)
    try:
        expected = resize(num, height, width, 2, transformers.side, least, most)
    except (ValueError, ZeroDivisionError):
        with pytest.raises(ValueError, match=r"200 times|chosen frames"):
            videos.fit(film, num, VideoLimits(least, most))
        return
    fit = videos.fit(film, num, VideoLimits(least, most))
    assert fit.size == (2, *expected)
    assert fit.num_tokens == expected[0] * expected[1] // transformers.side**2


@on_loop_of_module
async def test_a_prompt_is_that_of_transformers(
    tokenizer: Tokenizer, transformers: Reference
) -> None:
    """Lists of frames, 1 a second; the template's ids around the video stay."""
    frames = scene(1, 9, 96, 64)
    messages = [user(text("Which?"), video(1), text(" or "), video(0))]
    asked = chat(messages, 0, media=media("video", "video"), media_options='{"fps": 1}')
    files = listed(frames[:5]), listed(frames[5:])
    found = await tokenizer.ask(*asked, *files)
    five = Clip([*frames[:5], frames[4]], labels=[f"<{each} seconds>" for each in (0.5, 2.5, 4.0)])
    four = Clip(frames[5:], labels=["<0.5 seconds>", "<2.5 seconds>"])
    check(found, transformers, messages, four, five)
    generate, (ids, *_) = found
    counted = Convert("c", "chat", False, media=media("video", "video"), media_options='{"fps": 1}')
    assert (await tokenizer.convert(counted, asked[1], *files)).tolist() == ids.tolist()
    again = chat([], 0, kind="ids", media=media("video", "video"), media_options='{"fps": 1}')[0]
    replay, _ = await tokenizer.ask(again, ids, asked[2], *files[::-1])
    assert replay.items == generate.items


def test_positions_match_transformers(family: Family, transformers: Reference) -> None:
    """Each pair of frames is by itself."""
    side, random = transformers.side, np.random.default_rng(0)
    for _ in range(30):
        items, kinds, grids = [], [0] * 3, []
        for groups, rows, columns in random.integers(1, 5, (3, 3)).tolist():
            grids.append([groups, 2 * rows, 2 * columns])
            for _ in range(groups):
                size = 2, rows * side, columns * side
                start, num = len(kinds), rows * columns
                items.append(Item(kind="video", start=start, num_tokens=num, size=size, digest=b""))
                kinds += [2] * num + [0] * 4
        of_kinds = torch.tensor([kinds])
        grid = torch.tensor(grids)
        index = transformers.model.model.get_rope_index
        expected, delta = index(of_kinds, of_kinds, video_grid_thw=grid)
        found = family.positions(items, len(kinds))
        assert found.tolist() == expected[:, 0].tolist()
        assert found.max() + 1 - len(kinds) == int(delta)
        assert len(kinds) <= MAX_LEN
