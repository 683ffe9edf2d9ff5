"""Images from a client's request to the tokenizer, and again after a loss."""

import asyncio
from pathlib import Path
from typing import Any

from services.gateway.metrics import BUFFERED_BYTES
from shared.errors import RETRY_AFTER_S
from shared.wire.messages import MEDIA_MINOR, Lost, ModelInfo, RequestKey
from tests.services.gateway.client import CHAT, Client, client_of, serving, with_model
from tests.services.gateway.fakes import Submitted, fake_tokenizer, until
from tests.services.gateway.media.asking import FILE, SEER, data_url, image, user

BODY: Any = {
    "messages": [user(image(FILE), image(b"other"))], "mm_processor_kwargs": {"max_pixels": 9},
}  # fmt: skip
pytestmark = with_model(SEER)


def files_of(request: Submitted) -> list[bytes]:
    assert len(request.submit.media) == len(request.files)
    return [each.tobytes() for each in request.files]


async def test_files_reach_the_tokenizer_and_a_replay_has_them_again(client: Client) -> None:
    asked, request = await client.begun(CHAT, **BODY)
    assert files_of(request) == [FILE, b"other"]
    assert request.submit.media_options == '{"max_pixels": 9}'
    params = [f"messages[0].content[{n}].image_url.url" for n in range(2)]
    assert [each.param for each in request.submit.media] == params
    num_bytes = len(FILE) + len(b"other")
    assert BUFFERED_BYTES._value.get() >= num_bytes
    request.accept()
    request.text("a")
    request.peer.send(Lost([RequestKey(*request.key)], is_explained=True))
    again = await client.tokenizer.submitted.get()
    assert (again.submit.kind, files_of(again)) == ("ids", [FILE, b"other"])
    assert BUFFERED_BYTES._value.get() >= num_bytes
    again.accept()
    again.num_sent[0] = 1
    again.text("b")
    assert (await client.finish(asked, again)).choices[0]["message"]["content"] == "ab"
    assert BUFFERED_BYTES._value.get() == 0


async def test_files_of_dropped_turns_are_not_kept(client: Client) -> None:
    dropped = bytes(512 << 10)
    body = {"messages": [user(image(dropped)), user(image(FILE))], "stream": True}
    asking = asyncio.ensure_future(client.http.post(CHAT, json=body))
    request = await client.tokenizer.submitted.get()
    assert BUFFERED_BYTES._value.get() >= len(dropped)
    request.accept(media=[1])
    request.text("a")
    async with await asking as response:
        await response.content.readline()
        assert len(FILE) <= BUFFERED_BYTES._value.get() < len(dropped)
        request.finish()
        await response.read()
    assert BUFFERED_BYTES._value.get() == 0


async def test_a_large_image_is_read_beside_other_requests(client: Client) -> None:
    file = bytes(range(256)) * (2 << 10)
    part = {"type": "image_url", "image_url": data_url(file)}
    _, request = await client.answered(CHAT, "a", messages=[user(part)])
    assert files_of(request) == [file]


async def test_a_tokenizer_that_knows_no_images_gets_none(tmp_path: Path, model: ModelInfo) -> None:
    async with (
        fake_tokenizer(tmp_path, "old", model, minor=MEDIA_MINOR - 1) as old,
        serving(tmp_path) as gateway,
        client_of(gateway) as client,
    ):
        answer = await client.post(CHAT, **BODY)
        assert answer.status == 503
        assert float(answer.headers["Retry-After"]) == RETRY_AFTER_S
        assert f"a tokenizer of protocol minor {MEDIA_MINOR}" in answer.error["message"]
        async with fake_tokenizer(tmp_path, "new", model) as new:
            await until(lambda: sum(peer.is_ready for peer in gateway.link.peers) == 2)
            for _ in range(2):
                await client.served(new.answer("a"), CHAT, **BODY)
        assert old.submitted.empty()
        assert not old.converted
