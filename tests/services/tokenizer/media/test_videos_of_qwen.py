"""Frames, sizes, tokens and positions of videos, as by transformers' processor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.media.families import read_family
from shared.media.family import Family, Film, VideoLimits, Videos
from shared.wire.messages import Item, MediumKind
from tests.media.checkpoints import preprocessor, save_checkpoint
from tests.media.references import Reference, reference
from tests.media.videos import metadata, processor_of

MANY = settings(max_examples=60, deadline=None)
FPS = st.sampled_from([24.0, 25.0, 30.0, 30000 / 1001, 60.0, 1.0, 0.5]) | st.floats(0.1, 120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    save_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Reference:
    return reference(folder)


@pytest.fixture(scope="module")
def family(folder: Path) -> Family:
    found = read_family(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def videos(family: Family) -> Videos:
    assert family.videos is not None
    return family.videos


def chosen(limits: VideoLimits, total: int, fps: float) -> list[int]:
    """By transformers; ValueError and ZeroDivisionError are its refusals."""
    find: Any = processor_of("qwen2_vl").Qwen2VLVideoProcessor.sample_frames
    options = {"num_frames": None, "fps": None, "temporal_patch_size": 2}
    processor: Any = type("Processor", (), options)
    asked = {"fps": limits.fps} if limits.num_frames is None else {"num_frames": limits.num_frames}
    bounds = {"min_frames": limits.min_frames, "max_frames": limits.max_frames}
    return find(processor, metadata(total, fps), **bounds, **asked).tolist()


@MANY
@given(
    total=st.integers(1, 40) | st.integers(1, 30_000),
    fps=FPS,
    wanted_fps=st.sampled_from([2.0, 1.0, 0.2, 4.0]) | st.floats(0.01, 60),
    num_frames=st.none() | st.integers(1, 900),
    bounds=st.tuples(st.integers(1, 40), st.integers(40, 768)),
)
@example(total=1, fps=1.0, wanted_fps=2.0, num_frames=None, bounds=(4, 768))
@example(total=3, fps=1.0, wanted_fps=2.0, num_frames=None, bounds=(4, 768))
@example(total=30_000, fps=30.0, wanted_fps=2.0, num_frames=None, bounds=(4, 768))
def test_frames_match_transformers(
    videos: Videos,
    total: int,
    fps: float,
    wanted_fps: float,
    num_frames: int | None,
    bounds: tuple[int, int],
) -> None:
    limits = VideoLimits(3136, 78400, wanted_fps, num_frames, *bounds)
    film = Film(64, 64, total, fps)
    try:
        expected = chosen(limits, total, fps)
    except (ValueError, ZeroDivisionError, RuntimeError):
        expected = []
    if not expected:
        with pytest.raises(ValueError, match=f"has {total} frames"):
            videos.frames(film, limits)
        return
    found = videos.frames(film, limits)
    num = len(found)
    # Its step in float32 may give one more at the end.
    assert expected[num:] in ([], [total], [total - 1])
    places = np.arange(num) * (total / num)
    is_close = np.abs(places - places.round()) < 1e-3  # rounded by vectors of the processor
    assert (np.abs(found - expected[:num]) <= is_close).all()
    assert 0 <= found.min() <= found.max() < total
    assert (np.diff(found) >= 0).all()


@MANY
@given(width=st.integers(1, 2000), height=st.integers(1, 2000), num=st.integers(2, 40))
def test_sizes_match_transformers(
    videos: Videos, oracle: Reference, width: int, height: int, num: int
) -> None:
    limits = videos.limits
    resize: Any = processor_of("qwen2_vl").smart_resize
    film = Film(width, height, num, 25.0)
    try:
        expected = resize(height, width, oracle.side, *limits[:2])
    except ValueError:
        with pytest.raises(ValueError, match="one side may be 200 times the other"):
            videos.fit(film, num, limits)
        return
    fit = videos.fit(film, num, limits)
    assert fit.size == (2, *expected)
    assert fit.num_tokens == expected[0] * expected[1] // oracle.side**2


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[MediumKind, int, int, int, float]]:
    """Kind, groups, rows, columns, seconds."""
    sides = st.integers(1, 9)
    kinds: tuple[MediumKind, MediumKind] = ("image", "video")
    images, videos = map(st.just, kinds)
    image = st.tuples(images, st.just(1), sides, sides, st.just(0.0))
    seconds = st.floats(0.01, 8)
    video = st.tuples(videos, st.integers(1, 9), sides, sides, seconds)
    return draw(st.lists(st.one_of(image, video), max_size=4))


@MANY
@given(layout=layouts(), texts=st.lists(st.integers(1, 6), min_size=5, max_size=5))
def test_positions_match_transformers(
    family: Family,
    oracle: Reference,
    layout: list[tuple[MediumKind, int, int, int, float]],
    texts: list[int],
) -> None:
    """The next one counts too; no position is above its index."""
    assert family.videos is not None
    items, kinds, kept = [], [0] * texts[0], []
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    for each, text in zip(layout, texts[1:], strict=False):
        kind, groups, rows, columns, seconds = each
        num, times = rows * columns, [0]
        if kind == "video":
            frames = np.arange(2 * groups)
            film = Film(8, 8, 2 * groups, 2 / seconds)
            try:
                times = [*family.videos.times(film, frames, num)]
            except ValueError:
                assert groups > 1
                assert 2 * np.float32(seconds) > num * 0.999
                continue
            kept.append(2 / (2 / seconds))
        for time in times:
            size = (1 + (kind == "video"), oracle.side * rows, oracle.side * columns)
            start = len(kinds)
            items.append(
                Item(kind=kind, start=start, num_tokens=num, size=size, digest=b"", time=time)
            )
            kinds += [1 + (kind == "video")] * num
        grids[kind].append([groups, 2 * rows, 2 * columns])
        kinds += [0] * text
    of_kinds = torch.tensor([kinds])
    given_grids = {f"{kind}_grid_thw": torch.tensor(found) for kind, found in grids.items()}
    expected, delta = oracle.model.model.get_rope_index(
        of_kinds, of_kinds, **given_grids, second_per_grid_ts=torch.tensor(kept)
    )
    found = family.positions(items, len(kinds))
    assert found.tolist() == expected[:, 0].tolist()
    assert found.max() + 1 - len(kinds) == int(delta) <= 0
    assert (found <= np.arange(len(kinds))).all()


def test_an_item_has_one_frame_or_two(family: Family, oracle: Reference) -> None:
    for frames in (1, 2):
        assert family.num_tokens((frames, oracle.side, 3 * oracle.side)) == 3
    with pytest.raises(ValueError, match="no image of the model has the size"):
        family.num_tokens((3, oracle.side, oracle.side))


def test_limits_come_from_the_files_that_transformers_reads(folder: Path, tmp_path: Path) -> None:
    def limits() -> tuple[Any, ...]:
        found = read_family(tmp_path)
        assert found is not None
        assert found.videos is not None
        return tuple(found.videos.limits)

    preprocessor(folder, tmp_path, size=None)
    assert limits() == (128 * 28 * 28, 768 * 28 * 28, 2.0, None, 4, 768, 24.0)
    preprocessor(folder, tmp_path)
    assert limits()[:2] == (56 * 56, 280 * 280)
    of_videos = tmp_path / "video_preprocessor_config.json"
    of_videos.write_text('{"min_pixels": 5, "max_pixels": 6, "fps": 1, "max_frames": 9}')
    assert limits() == (5, 6, 1.0, None, 4, 9, 24.0)
    nested = tmp_path / "processor_config.json"
    nested.write_text('{"image_processor": {}}')
    assert limits()[:2] == (5, 6)
    nested.write_text('{"video_processor": {"size": {"shortest_edge": 7, "longest_edge": 8}}}')
    assert limits()[:3] == (7, 8, 2.0)
    for wrong in ('"patch_size": 16', '"image_std": [1, 1, 1]', '"do_resize": false', '"fps": "a"'):
        of_videos.write_text("{" + wrong + "}")
        nested.unlink(missing_ok=True)
        with pytest.raises(ConfigError, match=f"video_preprocessor_config.json: .*{wrong[1:4]}"):
            read_family(tmp_path)


def test_a_film_without_times_is_refused(videos: Videos) -> None:
    for fps in (0.0, float("inf"), 1001.0):
        with pytest.raises(ValueError, match="frames a second; the limit is 1000"):
            videos.frames(Film(64, 64, 10, fps), videos.limits)
