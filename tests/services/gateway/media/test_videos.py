"""Videos in the parts of chats: files, lists of frames, and refusals."""

import base64
from typing import Any

import pytest
from msgspec import structs

from shared.media.frame_list import unpack
from shared.wire.messages import MEDIA_MINOR, VIDEO_MINOR, Medium
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.media.asking import (
    FILE,
    SEER,
    data_url,
    files_of,
    image,
    messages_of,
    parsed,
    prompt_of,
    user,
)
from tests.services.gateway.media.test_parts import refused

WATCHER = structs.replace(SEER, more_media=["video"])
FILM = data_url(kind="video/mp4")
PLACE = "messages[0].content[0].video_url"


def video(url: Any = FILM) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def test_a_video_is_a_file_by_itself() -> None:
    for part, place in ((video(), f"{PLACE}.url"), (video() | {"video_url": FILM}, PLACE)):
        prompt = prompt_of(user(part, image()), model=WATCHER)
        kinds = [{"type": "video", "media": 0}, {"type": "image", "media": 1}]
        assert messages_of(prompt) == [user(*kinds)]
        assert files_of(prompt) == [FILE, FILE]
        assert prompt.media[0].medium == Medium(kind="video", param=place)


def test_frames_are_files_after_commas() -> None:
    files = [bytes([number]) * (number + 1) for number in range(4)] + [bytes(200 << 10)]
    frames = ",".join(base64.b64encode(file).decode() for file in files)
    prompt = prompt_of(user(video(f"data:video/jpeg;base64,{frames}")), model=WATCHER)
    [found] = files_of(prompt)
    assert unpack(found) == files
    assert unpack(FILE) is None


def test_a_peer_of_an_older_release_gets_no_video() -> None:
    assert prompt_of(user(image(), video()), model=WATCHER).minor == VIDEO_MINOR
    assert prompt_of(user(image()), model=WATCHER).minor == MEDIA_MINOR


def test_videos_have_a_limit_of_their_own() -> None:
    one = [user(video(), image())]
    settings = {"limit_mm_per_prompt": {"image": 3, "video": 2}, "model": WATCHER}
    assert len(prompt_of(*one * 2, **settings).media) == 4
    error = refused(*one * 3, **settings)
    assert error.param == "messages[2].content[0]"
    assert error.message.endswith(
        'is video 3 of the request; the limit is limit-mm-per-prompt = {"video": 2}'
    )


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (data_url(), "its media type is none of a video"),
        ("data:video/mp4,abc", "it has no base64; expected a data: URL"),
        ("data:video/jpeg;base64,YQ==,", "has no data"),
        ("data:video/jpeg;base64," + "YQ==," * 2048, "has 2049 frames; the limit is 2048"),
        ("data:video/jpeg;base64,YQ==,?", "is not base64"),
        ("https://a.example/a.mp4", "nothing is fetched (allowed-media-domains), expected a data:"),
        (5, "is 5; expected a data: URL"),
        (None, "video_url.url is required"),
    ],
)
def test_malformed_videos_are_refused(url: Any, text: str) -> None:
    error = refused(user(video(url)), model=WATCHER)
    assert text in error.message
    assert error.param == f"{PLACE}.url"


def test_models_without_videos_and_other_roles_are_refused() -> None:
    for model in (SEER, MODEL):
        error = refused(user(video()), model=model)
        assert error.message.endswith('.type is "video_url"; the model fish takes no videos')
    error = refused({"role": "assistant", "content": [video()]}, model=WATCHER)
    assert "is a video of role assistant; expected one of user" in error.message
    body = {"messages": [user(video())], "mm_processor_kwargs": {"fps": 1}}
    assert parsed(body, model=WATCHER).prompts[0].media_options == '{"fps": 1}'
