"""Images through real processes: each text is the one of transformers on the same picture, alone,
in a crowd, with prefix hits and after kills."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from PIL import Image

from benchmarks.harness.fleet import Fleet, running_fleet
from tests.media.checkpoints import save_checkpoint
from tests.media.families import FAMILIES, WITH_STATES
from tests.media.gemma3_checkpoints import StretchedReference, gemma3_reference, save_gemma3
from tests.media.gemma4_checkpoints import gemma4_reference, save_gemma4, save_unified
from tests.media.glm_checkpoints import glm_reference, save_glm
from tests.media.internvl_checkpoints import save_internvl, save_qianfan, tiles_reference
from tests.media.lfm_checkpoints import parts_reference, save_lfm2
from tests.media.llava_checkpoints import rows_reference, save_lighton, save_mistral3
from tests.media.pictures import picture, png
from tests.media.references import Clip, Reference, reference
from tests.media.videos import decoded, encoded, needs_av, scene
from tests.mesh.forks import fork

SETTINGS = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": "2048",
    "SERVED_MODEL_NAME": "qwen",
    "DRAIN_TIMEOUT_S": "10",
}
GEMMA3 = "gemma3"
OTHERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Reference]]] = {
    GEMMA3: (save_gemma3, gemma3_reference),
    "gemma4": (save_gemma4, gemma4_reference),
    "gemma4_unified": (save_unified, gemma4_reference),
    "glm_ocr": (save_glm, glm_reference),
    "internvl": (save_internvl, tiles_reference),
    "lfm2_vl": (save_lfm2, parts_reference),
    "lighton_ocr": (save_lighton, rows_reference),
    "mistral3": (save_mistral3, rows_reference),
    "qianfan_ocr": (save_qianfan, tiles_reference),
}
ALWAYS = "qwen2.5-vl"
SERVED = [
    pytest.param(name, marks=() if name == ALWAYS else pytest.mark.slow)
    for name in (*FAMILIES, *WITH_STATES, *OTHERS)
]
WITH_LOSSES = [ALWAYS, GEMMA3]
QUESTION = "Describe the picture."
NUM_TOKENS = 24

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[ALWAYS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, family = tmp_path_factory.mktemp("vl"), request.param
    if family in OTHERS:
        OTHERS[family][0](folder)
    else:
        save_checkpoint(folder, family=family)
    return folder


@pytest.fixture(scope="module")
def transformers(folder: Path) -> Reference:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return OTHERS[kind][1](folder) if kind in OTHERS else reference(folder)


@asynccontextmanager
async def serving(directory: Path, folder: Path, **nums: int) -> AsyncIterator[Fleet]:
    async with running_fleet(directory, SETTINGS | {"MODEL": str(folder)}, fork) as fleet:
        await fleet.start_all(**{"scheduler": 1, "worker": 1, "tokenizer": 1, "gateway": 1} | nums)
        yield fleet


def part(image: Image.Image) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def video(file: bytes) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(file).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def ask(*content: Image.Image | str) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": each} if isinstance(each, str) else part(each) for each in content
    ]
    return {"role": "user", "content": parts}


def pictures_of(*contents: tuple[Image.Image | str, ...]) -> list[Image.Image]:
    return [each for content in contents for each in content if not isinstance(each, str)]


class Client:
    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._session = session

    async def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        url = f"{self._fleet.of('gateway')[0].url}{path}"
        async with self._session.post(url, json={"model": "qwen"} | body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    async def get(self, path: str) -> Any:
        url = f"{self._fleet.of('gateway')[0].url}{path}"
        async with self._session.get(url) as response:
            return await response.json()

    async def chat(self, messages: Messages, **fields: Any) -> Any:
        body = {"messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
        return await self.post(body | fields)

    async def text(self, messages: Messages, **fields: Any) -> str:
        text: str = (await self.chat(messages, **fields))["choices"][0]["message"]["content"]
        return text

    async def failure(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        url = f"{self._fleet.of('gateway')[0].url}/v1/chat/completions"
        async with self._session.post(url, json={"model": "qwen"} | body) as response:
            return response.status, (await response.json())["error"]


@asynccontextmanager
async def client_of(fleet: Fleet) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(fleet, session)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with serving(tmp_path_factory.mktemp("fleet"), folder) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with client_of(fleet) as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("folder", SERVED, indirect=True, scope="module")
async def test_texts_match_transformers(client: Client, transformers: Reference) -> None:
    contents = [
        (picture(1, 200, 150), QUESTION),
        (picture(2, 200, 150), QUESTION),
        (QUESTION,),
        ("Compare ", picture(3, 90, 90), " with ", picture(4, 300, 80), picture(3, 90, 90), "."),
        (picture(5, 20, 30),),
    ]
    chats = [[ask(*content)] for content in contents]
    expected = [
        transformers.expect(chat, pictures_of(content), NUM_TOKENS).text
        for chat, content in zip(chats, contents, strict=True)
    ]
    assert expected[0] != expected[1] != expected[2]
    assert [await client.text(chat) for chat in chats] == expected
    crowd = await asyncio.gather(*(client.text(chat) for chat in 4 * chats))
    assert crowd == 4 * expected
    choices = (await client.chat(chats[0], n=4))["choices"]
    assert [each["message"]["content"] for each in choices] == 4 * expected[:1]


async def test_the_same_image_in_the_next_turn_is_cached_and_another_is_not(
    client: Client, transformers: Reference
) -> None:
    first, second = picture(11, 140, 140), picture(12, 140, 140)
    chat = [ask(first, QUESTION)]
    answer = await client.text(chat)
    chat += [{"role": "assistant", "content": answer}, ask("And this one? ", second)]
    reply = await client.chat(chat)
    expected = transformers.expect(chat, [first, second], NUM_TOKENS)
    assert reply["choices"][0]["message"]["content"] == expected.text
    assert reply["usage"]["prompt_tokens"] == len(expected.prompt_ids)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    other = await client.chat([ask(picture(13, 140, 140), QUESTION)])
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    smaller = await client.chat(chat[:1], mm_processor_kwargs={"max_pixels": 84 * 84})
    assert smaller["usage"]["prompt_tokens"] < len(expected.prompt_ids)
    assert smaller["usage"]["prompt_tokens_details"]["cached_tokens"] < 16


@needs_av
async def test_a_video_gives_the_text_of_transformers(
    client: Client, transformers: Reference
) -> None:
    file = encoded(scene(1, 8, 84, 112), 4.0)
    clip = Clip(decoded(file)[::2])
    question = {"type": "text", "text": QUESTION}
    asked: Messages = [{"role": "user", "content": [{"type": "video"}, question]}]
    expected = transformers.expect(asked, [], NUM_TOKENS, [clip]).text
    assert await client.text([{"role": "user", "content": [video(file), question]}]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("folder", [GEMMA3], indirect=True, scope="module")
async def test_images_of_turns_may_be_computed_whole(
    client: Client, transformers: Reference
) -> None:
    """Each turn has an image; the ones before are cached. Parts of an image are images."""
    chat: Messages = []
    pictures: list[Image.Image] = []
    for turn in range(4):
        pictures.append(picture(60 + turn, 100 + 9 * turn, 80))
        chat.append(ask(f"Turn {turn}:\n", pictures[-1], "\n", QUESTION))
        expected = transformers.expect(chat, pictures, NUM_TOKENS)
        reply = await client.chat(chat, n=2)
        texts = [each["message"]["content"] for each in reply["choices"]]
        assert texts == [expected.text] * 2
        assert reply["usage"]["prompt_tokens"] == len(expected.prompt_ids)
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 64 * turn
        chat.append({"role": "assistant", "content": texts[0]})
    scan: dict[str, Any] = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
    wide = picture(70, 300, 100)
    assert isinstance(transformers, StretchedReference)
    inputs = transformers.inputs(
        transformers.tokenizer.apply_chat_template(
            [ask(wide, QUESTION)], tokenize=False, add_generation_prompt=True
        ),
        [wide],
        **scan,
    )
    found = transformers.model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS)
    new = found[0, inputs["input_ids"].shape[1] :]
    text = await client.text([ask(wide, QUESTION)], mm_processor_kwargs=scan)
    assert text == transformers.tokenizer.decode(new, skip_special_tokens=True)


async def test_bad_images_are_refused_by_name_and_cost_nobody_else_anything(
    client: Client, transformers: Reference
) -> None:
    content = (picture(21, 56, 56), QUESTION)
    good = asyncio.create_task(client.text([ask(*content)]))
    bad = base64.b64encode(b"<svg/>").decode()
    url = {"url": f"data:image/png;base64,{bad}"}
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    status, error = await client.failure({"messages": chat})
    assert status == 400
    assert error["param"] == "messages[0].content[0].image_url.url"
    typed = [ask(picture(21, 56, 56), "a placeholder: <|image_pad|>")]
    status, error = await client.failure({"messages": typed})
    assert (status, error["param"]) == (400, "messages[0]")
    expected = transformers.expect([ask(*content)], pictures_of(content), NUM_TOKENS)
    assert await good == expected.text


async def test_prompts_are_counted_with_their_images(
    client: Client, transformers: Reference
) -> None:
    content = (picture(31, 100, 60), QUESTION)
    expected = transformers.expect([ask(*content)], pictures_of(content), 1)
    counted = await client.post({"messages": [ask(*content)]}, "/tokenize")
    assert counted["tokens"] == expected.prompt_ids


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("folder", WITH_LOSSES, indirect=True, scope="module")
@pytest.mark.asyncio(loop_scope="function")
async def test_texts_survive_the_loss_of_each_service(
    tmp_path: Path, folder: Path, transformers: Reference
) -> None:
    contents = [(picture(number, 120, 100), QUESTION) for number in range(4)]
    chats = [[ask(*content)] for content in contents]
    expected = [
        transformers.expect(chat, pictures_of(content), 160).text
        for chat, content in zip(chats, contents, strict=True)
    ]
    async with (
        serving(tmp_path, folder, worker=2, tokenizer=2) as fleet,
        client_of(fleet) as client,
    ):
        for kind in ("worker", "scheduler", "tokenizer"):
            texts = [
                asyncio.create_task(client.text(chat, max_tokens=160, ignore_eos=False))
                for chat in chats
            ]
            await progress(fleet, 8)
            await fleet.kill(fleet.of(kind)[0])
            if kind == "scheduler":
                await fleet.start("scheduler")
            assert await asyncio.gather(*texts) == expected, kind


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="function")
async def test_a_text_goes_on_while_an_image_is_encoded(
    tmp_path: Path, folder: Path, transformers: Reference
) -> None:
    contents = [(QUESTION,), (picture(41, 280, 280), " and ", picture(42, 90, 90), QUESTION)]
    chats = [[ask(*content)] for content in contents]
    expected = [
        transformers.expect(chat, pictures_of(content), NUM_TOKENS).text
        for chat, content in zip(chats, contents, strict=True)
    ]
    hold, begun = tmp_path / "hold", tmp_path / "begun"
    hold.touch()
    async with (
        running_fleet(tmp_path, SETTINGS | {"MODEL": str(folder)}, fork) as fleet,
        client_of(fleet) as client,
        client_of(fleet) as other,
    ):
        await fleet.start("worker", module="tests.mesh.held_worker", TEST_HOLD=str(tmp_path))
        await fleet.start_all(scheduler=1, tokenizer=1, gateway=1)
        with_images = asyncio.create_task(client.text(chats[1]))
        async with asyncio.timeout(60):
            while not begun.exists():
                await asyncio.sleep(0.005)
        assert await other.text(chats[0]) == expected[0]
        assert not with_images.done()
        hold.unlink()
        assert await with_images == expected[1]
        (worker,) = fleet.of("worker")
        assert (await worker.metrics())["shoal_worker_encode_seconds_total"] > 0


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="function")
async def test_the_engine_for_gpus_gives_the_same_texts(
    tmp_path: Path, folder: Path, transformers: Reference
) -> None:
    """On a CPU; each prompt comes once more when it is cached."""
    pytest.importorskip("tests.mesh.device_worker")
    contents = [
        (picture(51, 280, 280), " and ", picture(52, 90, 90), QUESTION),
        (picture(51, 280, 280), " and ", picture(53, 90, 90), QUESTION),
        (QUESTION,),
    ]
    chats = [[ask(*content)] for content in contents]
    expected = [
        transformers.expect(chat, pictures_of(content), NUM_TOKENS).text
        for chat, content in zip(chats, contents, strict=True)
    ]
    async with (
        running_fleet(tmp_path, SETTINGS | {"MODEL": str(folder)}, fork) as fleet,
        client_of(fleet) as client,
    ):
        await fleet.start("worker", module="tests.mesh.device_worker", MAX_NUM_BATCHED_TOKENS="64")
        await fleet.start_all(scheduler=1, tokenizer=1, gateway=1)
        for _ in range(2):
            assert await asyncio.gather(*map(client.text, 2 * chats)) == 2 * expected


async def progress(fleet: Fleet, num_steps: int) -> None:
    """Waits until the workers have computed further steps."""

    async def count() -> int:
        return sum([(await each.status())["num_steps"] for each in fleet.of("worker")])

    before = await count()
    async with asyncio.timeout(60):
        while await count() < before + num_steps:
            await asyncio.sleep(0.005)
