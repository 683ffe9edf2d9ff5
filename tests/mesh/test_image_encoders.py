"""A worker of the role encoder, as a real process: it changes no text, nor does its death."""

import asyncio
import signal
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.harness.fleet import Member, running_fleet
from tests.media.checkpoints import save_checkpoint
from tests.media.pictures import picture
from tests.media.references import Reference, reference
from tests.mesh.forks import fork
from tests.mesh.test_images import (
    NUM_TOKENS,
    QUESTION,
    SETTINGS,
    Client,
    ask,
    client_of,
    pictures_of,
)

ENCODED = "shoal_worker_encoded_tokens_total"
LOOK_S = 0.01

Content = tuple[Image.Image | str, ...]


def contents_of(first: int) -> list[Content]:
    return [
        (picture(first, 120, 100), QUESTION),
        (picture(first + 1, 200, 90), "and", picture(first, 120, 100)),
    ]


def expected_of(transformers: Reference, contents: list[Content]) -> list[str]:
    chats = [([ask(*each)], pictures_of(each)) for each in contents]
    return [transformers.expect(*each, NUM_TOKENS).text for each in chats]


async def texts_of(client: Client, contents: list[Content]) -> list[str]:
    return await asyncio.gather(*(client.text([ask(*each)]) for each in contents))


async def num_encoded(member: Member) -> float:
    return (await member.metrics())[ENCODED]


async def until_linked(encoder: Member) -> None:
    """Until the worker can give it images."""
    await encoder.until_ready()
    while not (await encoder.metrics()).get('shoal_peers{service="worker"}'):
        await asyncio.sleep(LOOK_S)


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_texts_match_transformers_with_an_encoder_and_after_its_death(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_checkpoint(folder, family="qwen2.5-vl")
    first, second = contents_of(1), contents_of(11)
    settings = SETTINGS | {"MODEL": str(folder), "TEST_HOLD": str(tmp_path)}
    async with running_fleet(tmp_path, settings, fork) as fleet, client_of(fleet) as client:
        held, role = "tests.mesh.held_worker", "encoder"
        encoder = await fleet.start("worker", module=held, WORKER_ROLE=role)
        worker = await fleet.start("worker")
        await fleet.start_all(scheduler=1, tokenizer=1, gateway=1)
        await until_linked(encoder)
        transformers = reference(folder)
        assert await texts_of(client, first) == expected_of(transformers, first)
        assert await num_encoded(worker) == 0
        assert await num_encoded(encoder) > 0
        (tmp_path / "begun").unlink()
        (tmp_path / "hold").touch()
        asked = asyncio.create_task(texts_of(client, second))
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(LOOK_S)
        assert await num_encoded(worker) == 0
        await encoder.end(signal.SIGKILL)
        assert await asked == expected_of(transformers, second)
        assert await num_encoded(worker) > 0
