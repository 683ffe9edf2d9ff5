"""Uploaded images: by their ids in requests of the API key that uploaded them."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from services.gateway.metrics import BUFFERED_BYTES
from tests.services.gateway.apis.batches.test_batches import ASKED
from tests.services.gateway.client import with_model
from tests.services.gateway.fakes import FakeTokenizer
from tests.services.gateway.media.asking import FILE, SEER
from tests.services.gateway.openai_client import clients

KEYS = ["key-of-ann", "key-of-bob"]


pytestmark = with_model(SEER)


async def upload(client: AsyncOpenAI, data: bytes = FILE, purpose: str = "vision") -> str:
    file: Any = await client.files.create(file=("a.png", data), purpose=purpose)  # type: ignore[arg-type]
    assert (file.bytes, file.purpose) == (len(data), purpose)
    return str(file.id)


def items(*parts: Any) -> Any:
    return [{"role": "user", "content": [*parts]}]


def part(file_id: str) -> dict[str, Any]:
    return {"type": "input_image", "file_id": file_id, "detail": "low"}


async def files_of(tokenizer: FakeTokenizer, asked: Any) -> list[bytes]:
    asking = asyncio.ensure_future(asked)
    request = await tokenizer.answer("a")
    await asking
    return [each.tobytes() for each in request.files]


async def refusal(asked: Any) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        await asked
    assert caught.value.status_code == 400
    return str(caught.value.body["message"])  # type: ignore[index]


async def test_uploaded_images_are_used_by_their_ids(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with clients(tmp_path) as client:
        first, second = await upload(client), await upload(client, b"other")
        content = items(part(first), part(second), part(first))
        asked = client.responses.create(model="fish", input=content)
        assert await files_of(tokenizer, asked) == [FILE, b"other", FILE]
        chat = client.chat.completions.create(model="fish", messages=items(part(second)))
        assert await files_of(tokenizer, chat) == [b"other"]
        source = {"type": "image", "source": {"type": "file", "file_id": first}}
        body = {"model": "fish", "messages": items(source), "max_tokens": 5}
        assert await files_of(tokenizer, client.post("/messages", body=body, cast_to=object)) == [
            FILE
        ]
        listed = await client.files.list(purpose="vision")
        assert {each.id for each in listed.data} == {first, second}
        assert (await client.files.content(first)).content == FILE
        await client.files.delete(first)
        text = await refusal(client.responses.create(model="fish", input=content))
        expected = (
            f'input[0].content[0].file_id is "{first}"; no file of purpose vision has this id'
        )
        assert text == expected
        text = await refusal(client.post("/messages", body=body, cast_to=object))
        assert text.startswith(f'messages.0.content.0.source.file_id is "{first}"; no file')
        assert BUFFERED_BYTES._value.get() == 0


async def test_a_file_belongs_to_its_api_key_and_has_a_purpose(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with clients(tmp_path, *KEYS) as (ann, bob):
        image, lines = await upload(ann), await upload(ann, b"{}\n", "batch")
        for client, file_id in ((bob, image), (ann, lines), (ann, "file-1"), (ann, "../x")):
            text = await refusal(client.responses.create(model="fish", input=items(part(file_id))))
            assert text.endswith("no file of purpose vision has this id")
        with pytest.raises(openai.BadRequestError, match="purpose is not batch"):
            await ann.batches.create(**ASKED, input_file_id=image)
        with pytest.raises(openai.BadRequestError, match='purpose is "x"; expected one of batch'):
            await upload(ann, purpose="x")
        asked = ann.responses.create(model="fish", input=items(part(image)))
        assert await files_of(tokenizer, asked) == [FILE]


async def test_an_upload_has_the_limit_of_a_body(tmp_path: Path, tokenizer: FakeTokenizer) -> None:
    settings = {"max_body_bytes": 2000}
    async with clients(tmp_path, **settings) as client:
        large, empty = await upload(client, bytes(3000)), await upload(client, b"")
        text = await refusal(client.responses.create(model="fish", input=items(part(large))))
        assert text.endswith(
            "; the files of the request have more bytes than max-body-bytes = 2000"
        )
        text = await refusal(client.responses.create(model="fish", input=items(part(empty))))
        assert text.endswith("it has no data")


async def test_without_a_folder_no_images_are_kept(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with clients(tmp_path, batch_dir=None) as client:
        text = await refusal(client.responses.create(model="fish", input=items(part("file-1"))))
        assert text.endswith('file_id is "file-1"; no files are kept (batch-dir)')
