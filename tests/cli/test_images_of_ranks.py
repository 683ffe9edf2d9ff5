"""Workers of two ranks or stages as a user starts them give transformers' texts about images."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from PIL import Image

from tests.cli.serving import Serving, is_alive, serving
from tests.cli.test_ranks import rank_of, worker_of
from tests.media.checkpoints import save_checkpoint
from tests.media.pictures import picture
from tests.media.references import Clip, Reference, reference
from tests.media.videos import decoded, encoded, needs_av, scene
from tests.mesh.test_images import NUM_TOKENS, QUESTION, ask, pictures_of, video

MODEL = "vl"
COMMON = (
    *("--dtype", "float32", "--max-model-len", "2048", "--served-model-name", MODEL),
    *("--worker-grace-s", "120"),
)
RANKS = ("--tensor-parallel-size", "2")
STAGES = ("--pipeline-parallel-size", "2")
WHOLE = ("--enable-expert-parallel",)
ERNIE = "ernie4.5-vl"
NUM_LONG = 120  # tokens of a request whose worker is lost

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

Messages = list[dict[str, Any]]


async def text_of(
    client: AsyncOpenAI, messages: Messages, num: int = NUM_TOKENS, begun: Any = None
) -> str:
    """Sets ``begun`` after some tokens."""
    given: Any = messages
    stream = await client.chat.completions.create(
        model=MODEL, messages=given, temperature=0, max_tokens=num, stream=True
    )
    pieces = []
    async for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        if begun is not None and len(pieces) > 3:
            begun.set()
    return "".join(pieces)


async def lose(shoal: Serving, rank: int, client: AsyncOpenAI, oracle: Reference) -> None:
    """Kills a rank while it computes two texts about images."""
    contents = [(picture(number, 120, 100), QUESTION) for number in range(2)]
    chats = [[ask(*content)] for content in contents]
    expected = [
        oracle.expect(chat, pictures_of(content), NUM_LONG).text
        for chat, content in zip(chats, contents, strict=True)
    ]
    begun, follower = asyncio.Event(), rank_of(shoal, 1)
    running = [asyncio.create_task(text_of(client, chat, NUM_LONG, begun)) for chat in chats]
    await begun.wait()
    victim = follower if rank else worker_of(shoal)
    assert follower is not None
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    assert await asyncio.gather(*running) == expected
    assert not is_alive(follower)


async def talk(client: AsyncOpenAI, oracle: Reference) -> None:
    """Each turn has one more image."""
    chat: Messages = []
    pictures: list[Image.Image] = []
    for turn in range(3):
        pictures.append(picture(60 + turn, 100 + 9 * turn, 80))
        chat.append(ask(f"Turn {turn}: ", pictures[-1], QUESTION))
        text = await text_of(client, chat)
        assert text == oracle.expect(chat, pictures, NUM_TOKENS).text
        chat.append({"role": "assistant", "content": text})


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen2.5-vl", RANKS),
        (ERNIE, RANKS),
        (ERNIE, (*RANKS, *WHOLE)),
        ("qwen2.5-vl", STAGES),
        ("qwen3-vl", STAGES),
        (ERNIE, STAGES),
    ],
    ids=str,
)
async def test_texts_match_transformers(
    tmp_path: Path, family: str, flags: tuple[str, ...]
) -> None:
    """One image and several, alone and at once, turns of a chat, and after the loss of each
    process."""
    save_checkpoint(tmp_path / "model", family=family)
    oracle = reference(tmp_path / "model")
    contents = [
        (picture(1, 200, 150), QUESTION),
        (picture(2, 200, 150), QUESTION),
        (QUESTION,),
        ("Compare ", picture(3, 90, 90), " with ", picture(4, 300, 80), picture(3, 90, 90), "."),
    ]
    chats = [[ask(*content)] for content in contents]
    expected = [
        oracle.expect(chat, pictures_of(content), NUM_TOKENS).text
        for chat, content in zip(chats, contents, strict=True)
    ]
    assert expected[0] != expected[1]
    (tmp_path / "mesh").mkdir(mode=0o700)
    model = "--model", str(tmp_path / "model")
    async with (
        serving(tmp_path / "mesh", *model, *COMMON, *flags) as shoal,
        shoal.client() as client,
    ):
        await shoal.until_ready()
        assert [await text_of(client, chat) for chat in chats] == expected
        crowd = await asyncio.gather(*(text_of(client, chat) for chat in 3 * chats))
        assert crowd == 3 * expected
        await talk(client, oracle)
        for rank in (1, 0):
            await lose(shoal, rank, client, oracle)


@needs_av
@pytest.mark.parametrize("flags", [RANKS, STAGES], ids=str)
async def test_a_video_gives_the_text_of_transformers(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    save_checkpoint(tmp_path / "model", family="qwen2.5-vl")
    file = encoded(scene(1, 8, 84, 112), 4.0)
    question = {"type": "text", "text": QUESTION}
    asked: Messages = [{"role": "user", "content": [{"type": "video"}, question]}]
    clips = [Clip(decoded(file)[::2])]
    expected = reference(tmp_path / "model").expect(asked, [], NUM_TOKENS, clips).text
    (tmp_path / "mesh").mkdir(mode=0o700)
    model = "--model", str(tmp_path / "model")
    async with (
        serving(tmp_path / "mesh", *model, *COMMON, *flags) as shoal,
        shoal.client() as client,
    ):
        await shoal.until_ready()
        given = [{"role": "user", "content": [video(file), question]}]
        assert await text_of(client, given) == expected
