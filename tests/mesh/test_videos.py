"""Videos through real processes: each text is the one of transformers on the same frames."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.media.checkpoints import save_checkpoint
from tests.media.gemma4_checkpoints import gemma4_reference, save_gemma4, save_unified
from tests.media.pictures import picture
from tests.media.references import Clip, Reference, reference
from tests.media.videos import decoded, encoded, needs_av, scene, stamped
from tests.mesh.test_images import NUM_TOKENS, Client, client_of, part, serving, video

pytestmark = pytest.mark.asyncio

FRAMES = scene(1, 12, 84, 112)  # of whole tokens
QUESTION = {"type": "text", "text": "Describe it."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    save_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def transformers(folder: Path) -> Reference:
    return reference(folder)


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


@pytest.mark.slow
@needs_av
async def test_texts_match_transformers(
    tmp_path: Path, folder: Path, transformers: Reference
) -> None:
    files = [encoded(FRAMES, 4.0), encoded(FRAMES[::-1], 4.0)]
    clips = [Clip(decoded(file)[::2]) for file in files]
    image = picture(2, 90, 90)
    chats = [user(video(file), QUESTION) for file in files]
    both = user(part(image), video(files[0]), QUESTION)
    placed: Any = {"type": "video"}
    expected = [
        transformers.expect(user(placed, QUESTION), [], NUM_TOKENS, [clip]) for clip in clips
    ]
    of_both = user({"type": "image"}, placed, QUESTION)
    wanted = transformers.expect(of_both, [image], NUM_TOKENS, clips[:1])
    async with serving(tmp_path, folder) as fleet, client_of(fleet) as client:
        await check(client, [*chats, both], [each.text for each in (*expected, wanted)])
        again = await client.chat(chats[0])
        assert again["choices"][0]["message"]["content"] == expected[0].text
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
        faster = await client.chat(chats[0], mm_processor_kwargs={"fps": 4})
        assert faster["usage"]["prompt_tokens"] > again["usage"]["prompt_tokens"]
        counted = await client.post({"messages": chats[0]}, "/tokenize")
        assert counted["tokens"] == expected[0].prompt_ids
        status, error = await client.failure({"messages": user(video(files[0][:900]))})
        assert (status, error["param"]) == (400, "messages[0].content[0].video_url.url")
        (model,) = (await client.get("/v1/models"))["data"]
        assert model["input_modalities"] == ["text", "image", "video"]


@needs_av
@pytest.mark.slow
async def test_frames_with_stamps_give_the_texts_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "ernie"
    save_checkpoint(folder, family="ernie4.5-vl")
    oracle, font = reference(folder), str(folder / "Roboto-Regular.ttf")
    files = [encoded(frames, 4.0) for frames in (FRAMES, FRAMES[::-1])]
    asked, texts = user({"type": "video"}, QUESTION), list[str]()
    for file in files:
        clip = Clip(stamped(font, decoded(file), 4.0))
        texts.append(oracle.expect(asked, [], NUM_TOKENS, [clip]).text)
    async with serving(tmp_path, folder) as fleet, client_of(fleet) as client:
        await check(client, [user(video(file), QUESTION) for file in files], texts)


@needs_av
@pytest.mark.slow
@pytest.mark.parametrize("save", [save_gemma4, save_unified])
async def test_frames_with_times_before_them_give_the_texts_of_transformers(
    tmp_path: Path, save: Callable[[Path], None]
) -> None:
    """Of twelve frames, one in two seconds, six."""
    folder = tmp_path / "gemma4"
    folder.mkdir()
    save(folder)
    oracle, frames = gemma4_reference(folder), scene(1, 12, 120, 84)
    files = [encoded(each, 0.5) for each in (frames, frames[::-1])]
    clips = [Clip(decoded(file)[::2], 4.0) for file in files]
    image, placed = picture(2, 120, 84), {"type": "video"}
    asked: list[Any] = [(user(placed, QUESTION), [], clip) for clip in clips]
    asked += [(user({"type": "image"}, placed, QUESTION), [image], clips[0])]
    texts = [oracle.expect(chat, images, NUM_TOKENS, [clip]).text for chat, images, clip in asked]
    chats = [user(video(file), QUESTION) for file in files]
    chats += [user(part(image), video(files[0]), QUESTION)]
    async with serving(tmp_path, folder) as fleet, client_of(fleet) as client:
        six: Any = {"mm_processor_kwargs": {"num_frames": 6}}
        assert texts[0] != texts[1]
        assert [await client.text(chat, **six) for chat in chats] == texts


async def check(client: Client, chats: list[Any], texts: list[str]) -> None:
    assert texts[0] != texts[1]
    assert [await client.text(chat) for chat in chats] == texts
