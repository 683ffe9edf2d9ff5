"""Prompts with videos: frames, ids and pixels as in transformers."""

import io
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from services.tokenizer.media import films
from services.tokenizer.text_model import TextModel
from shared.media.frame_list import pack
from shared.wire.codec import Array
from shared.wire.messages import Convert, Failed, Medium
from tests.media.pictures import picture
from tests.media.references import Clip, Reference
from tests.media.videos import decoded, encoded, index_first, needs_av, scene
from tests.services.tokenizer.media.conftest import MakeReading, on_loop_of_module
from tests.services.tokenizer.media.files import file_of
from tests.services.tokenizer.media.test_requests import Message, Tokenizer, chat, image, text, user

pytestmark = on_loop_of_module

FPS = 4.0
FRAMES = scene(1, 13, 84, 56)  # of whole tokens, so that they are not resized
TURNED = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)  # a quarter, clockwise


def video(number: int) -> Message:
    return {"type": "video", "media": number}


def media(*kinds: Any) -> list[Medium]:
    return [Medium(kind=kind, param=f"{kind} {number}") for number, kind in enumerate(kinds)]


def array(file: bytes) -> Array:
    return np.frombuffer(file, np.uint8)


def listed(frames: list[Image.Image]) -> Array:
    return pack([file_of(frame) for frame in frames])


@pytest_asyncio.fixture(loop_scope="module")
async def tokenizer(model: TextModel, make_reading: MakeReading):
    reading = make_reading()
    yield Tokenizer(model, reading)
    await reading.close()


def check(found: Any, reference: Reference, messages: list[Message], *clips: Clip) -> None:
    """The prompt is the one of ``clips``, whose frames lie in items of two."""
    generate, (ids, _, *pixels) = found
    prompt = reference.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    wanted = reference.inputs(prompt, [], clips)
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    pairs = [
        clip.frames[start : start + 2] for clip in clips for start in range(0, len(clip.frames), 2)
    ]
    by_digest = dict(
        zip(dict.fromkeys(item.digest for item in generate.items), pixels, strict=True)
    )
    for item, pair in zip(generate.items, pairs, strict=True):
        assert item.kind == "video"
        assert item.size == (2, pair[0].height, pair[0].width)
        buffer = b"".join(each.tobytes() for each in (pair[0], pair[-1]))
        assert by_digest[item.digest].tobytes() == buffer


@needs_av
@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4")]
)
async def test_frames_of_a_file_are_chosen_and_kept_in_pairs(
    tokenizer: Tokenizer, transformers: Reference, kind: str, codec: str
) -> None:
    """13 frames of 3.25 s; of 6.5 wanted ones 6 are taken."""
    file = encoded(FRAMES, FPS, kind, codec)
    every = decoded(file)
    messages = [user(text("Describe it."), video(0))]
    asked = chat(messages, 0, media=media("video"))
    found = await tokenizer.ask(*asked, array(file))
    clip = Clip([every[number] for number in (0, 2, 4, 6, 8, 10)])
    check(found, transformers, messages, clip)
    interval = 2 * 2 / (6 / 13 * FPS)  # positions
    assert [item.time for item in found[0].items] == [int(number * interval) for number in range(3)]


@needs_av
@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ('{"fps": 1}', [0, 3, 6, 9]),
        ('{"num_frames": 5}', [0, 3, 6, 9]),
        ('{"num_frames": 2}', [0, 6]),
        ('{"fps": 100}', list(np.arange(12) * 13 // 12)),
    ],
)
async def test_options_choose_the_frames(
    tokenizer: Tokenizer, transformers: Reference, options: str, numbers: list[int]
) -> None:
    file = encoded(FRAMES, FPS)
    every = decoded(file)
    messages = [user(video(0))]
    asked = chat(messages, 0, media=media("video"), media_options=options)
    found = await tokenizer.ask(*asked, array(file))
    check(found, transformers, messages, Clip([every[number] for number in numbers]))


async def test_the_times_count_where_frames_are_equal(tokenizer: Tokenizer) -> None:
    """Digests of later frames differ, since their positions do."""
    file, digests = listed([picture(1, 84, 56)] * 8), []
    for options in ('{"fps": 2}', '{"fps": 1}'):
        asked = chat([user(video(0))], 0, media=media("video"), media_options=options)
        generate, _ = await tokenizer.ask(*asked, file)
        assert len({item.digest for item in generate.items}) == 4
        digests.append({item.digest: item.time for item in generate.items})
    first, second = digests
    assert [*first.values()] == [0, 2, 4, 6]
    shared = first.keys() & second.keys()
    assert {each: first[each] for each in shared} == {each: second[each] for each in shared}
    assert len(shared) == 2


@needs_av
async def test_frames_are_upright(tokenizer: Tokenizer, transformers: Reference) -> None:
    file = bytearray(encoded(FRAMES, FPS))
    place = file.index(b"tkhd") + 44
    file[place : place + len(TURNED)] = TURNED
    every = [frame.transpose(Image.Transpose.ROTATE_270) for frame in decoded(bytes(file))]
    messages = [user(video(0))]
    found = await tokenizer.ask(*chat(messages, 0, media=media("video")), array(bytes(file)))
    clip = Clip([every[number] for number in (0, 2, 4, 6, 8, 10)])
    assert clip.frames[0].size == (56, 84)
    check(found, transformers, messages, clip)


async def test_a_list_of_frames_is_taken_whole(
    tokenizer: Tokenizer, transformers: Reference
) -> None:
    """24 frames a second, as transformers takes it, unless the request says another number."""
    messages = [user(video(0), text(" then "), video(1))]
    files = listed(FRAMES[:5]), listed(FRAMES[5:9])
    asked = chat(messages, 0, media=media("video", "video"))
    found = await tokenizer.ask(*asked, *files)
    clips = [Clip([*FRAMES[:5], FRAMES[4]]), Clip(FRAMES[5:9])]
    check(found, transformers, messages, *clips)
    assert [item.time for item in found[0].items] == [0] * 5
    slower = chat(messages, 0, media=media("video", "video"), media_options='{"fps": 1}')
    generate, _ = await tokenizer.ask(*slower, *files)
    assert [item.time for item in generate.items] == [0, 4, 8, 0, 4]


async def test_ids_of_a_replay_and_counts_match_the_prompt(tokenizer: Tokenizer) -> None:
    messages = [user(image(1), text("?"), video(0))]
    asked, prompt, nothing = chat(messages, 0, media=media("video", "image"))
    files = listed(FRAMES[:4]), file_of(picture(2, 84, 84))
    generate, (ids, _, *pixels) = await tokenizer.ask(asked, prompt, nothing, *files)
    assert [item.kind for item in generate.items] == ["image", "video", "video"]
    again = chat([], 0, kind="ids", media=media("image", "video"))[0]
    replay, (same, _, *others) = await tokenizer.ask(again, ids, nothing, *files[::-1])
    assert (replay.items, same.tolist()) == (generate.items, ids.tolist())
    assert [each.tobytes() for each in others] == [each.tobytes() for each in pixels]
    counted = Convert("c", "chat", False, media=media("video", "image"))
    assert (await tokenizer.convert(counted, prompt, *files)).tolist() == ids.tolist()


async def refused(tokenizer: Tokenizer, file: Array, options: str = "", *parts: Message) -> Failed:
    asked = chat([user(*parts or (video(0),))], 0, media=media("video"), media_options=options)
    failed = await tokenizer.ask(*asked, file)
    assert isinstance(failed, Failed)
    assert failed.status == 400
    return failed


@needs_av
async def test_a_trimmed_file_has_the_frames_that_are_shown() -> None:
    """An edit list ends it after a half of its frames, as phones write it."""
    file = bytearray(encoded(FRAMES, FPS))
    place = file.index(b"elst") + 12
    duration = int.from_bytes(file[place : place + 4], "big")
    file[place : place + 4] = (duration // 2).to_bytes(4, "big")
    found = films.VideoFile(file)
    assert 4 <= found.num_frames <= 10
    assert len([*found.frames(range(found.num_frames))]) == found.num_frames


@needs_av
async def test_cut_and_strange_files_are_refused_and_the_next_is_read(
    tokenizer: Tokenizer,
) -> None:
    file = encoded(FRAMES, FPS)
    for part in range(10):
        failed = await refused(tokenizer, array(file[: len(file) * part // 10]))
        assert "video 0 is " in failed.message or "video 0 has " in failed.message
    whole = index_first(file)
    assert len(decoded(whole)) == 13
    half = (whole.index(b"mdat") + len(whole)) // 2
    for strange, problem in (
        (whole[:half], "is a video of 13 frames that ends before the last"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "is no video in MP4, WebM, Matroska or AVI"),
        (file_of(FRAMES[0]).tobytes(), "is no video in MP4, WebM, Matroska or AVI"),
        (file[:64] + bytes(len(file)), "is a video that cannot be decoded"),
    ):
        assert problem in (await refused(tokenizer, array(strange))).message
    found = await tokenizer.ask(*chat([user(video(0))], 0, media=media("video")), array(file))
    assert len(found[0].items) == 3


@needs_av
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ('{"num_frames": 14}', "has 13 frames, 4 a second; 14 of them are wanted"),
        ('{"fps": 0.001}', "4 of them"),
        ('{"fps": 1e-40}', "Expected `float` >= 0.001"),
        ('{"fps": 1, "num_frames": 2}', "num_frames is given in addition to fps"),
        ('{"fps": "2"}', "Expected `float | null`, got `str`"),
        ('{"max_pixels": 78401}', "78401 pixels; the limit is 78400"),
        ('{"do_sample_frames": false}', "do_sample_frames"),
    ],
)
async def test_options_that_fit_nothing(tokenizer: Tokenizer, options: str, problem: str) -> None:
    if "0.001" in options:  # min_frames of transformers
        asked = chat([user(video(0))], 0, media=media("video"), media_options=options)
        generate, _ = await tokenizer.ask(*asked, array(encoded(FRAMES, FPS)))
        assert len(generate.items) == 2
        return
    failed = await refused(tokenizer, array(encoded(FRAMES, FPS)), options)
    assert problem in failed.message


async def test_lists_that_make_no_video(tokenizer: Tokenizer) -> None:
    for frames, problem in (
        ([FRAMES[0], picture(1, 56, 84)], "is a list of images that differ in size"),
        ([picture(1, 1100, 1000)] * 2, "has 1100 x 1000 pixels; the limit is 1048576"),
        ([picture(1, 402, 2)] * 2, "is 402 x 2 pixels; one side may be 200 times the other"),
    ):
        assert problem in (await refused(tokenizer, listed(frames))).message
    broken = pack([file_of(FRAMES[0]), array(b"<html>")])
    problem = "has a frame 1 that is no image in JPEG, PNG, WebP or GIF"
    assert problem in (await refused(tokenizer, broken)).message
    junk = array(pack([]).tobytes()[:-1] + b"\xff")
    assert "is a video that cannot be decoded" in (await refused(tokenizer, junk)).message
    empty = await refused(tokenizer, pack([]))
    assert "is a video that cannot be decoded" in empty.message


async def test_a_part_of_another_kind_and_a_placeholder_in_a_text_are_refused(
    tokenizer: Tokenizer,
) -> None:
    file = listed(FRAMES[:2])
    failed = await refused(tokenizer, file, "", image(0))
    assert "writes 1 placeholders (<|image_pad|>) for 0 images" in failed.message
    failed = await refused(tokenizer, file, "", video(0), text("<|video_pad|>"))
    assert "holds the text <|video_pad|>, which stands for a video of this prompt" in failed.message


async def test_long_prompts_are_refused_before_frames_are_decoded(tokenizer: Tokenizer) -> None:
    failed = await refused(tokenizer, listed([picture(1, 280, 280)] * 90))
    assert "the prompt has 4500 or more of images and videos alone" in failed.message
    failed = await refused(tokenizer, listed([picture(1, 28, 28)] * 2050), '{"min_pixels": 784}')
    assert failed.message == "video 0 has 2050 frames; the limit is 2048"
    messages, options = [user(video(0), video(1))], '{"min_pixels": 784}'
    asked = chat(messages, 0, media=media("video", "video"), media_options=options)
    failed = await tokenizer.ask(*asked, *(listed([picture(n, 28, 28)] * 1026) for n in range(2)))
    assert "makes 1026 images and groups of frames" in failed.message


class _NoFilm:
    """A container with a false number of frames."""

    average_rate, frames = 0, 1 << 40

    def __init__(self, width: int = 64) -> None:
        self.codec_context = SimpleNamespace(width=width, height=64, name="h264")
        self.codec = SimpleNamespace(canonical_name="h264")
        self.streams = SimpleNamespace(video=[self])
        self.close = lambda: None

    def __enter__(self) -> "_NoFilm":
        return self

    def __exit__(self, *error: object) -> None:
        return


async def test_a_film_without_a_rate_or_a_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames without a rate are those of a list, which are all taken."""
    for width in (64, 0):
        opened = SimpleNamespace(open=lambda *_, width=width, **__: _NoFilm(width))
        monkeypatch.setattr(films, "av", opened)
        with pytest.raises(films.Unwatchable, match=f"{width} x 64 pixels with 0 frames a second"):
            films.VideoFile(bytearray(b"    ftyp"))


async def test_without_the_package_a_file_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(films, "av", None)
    with pytest.raises(
        films.Unwatchable, match=r"no package av to decode it; install shoal\[video\]"
    ):
        films.VideoFile(bytearray(io.BytesIO(b"").getvalue()))
