"""Images in the requests of every API, inside and from other hosts."""

from pathlib import Path

import aiohttp

from tests.services.gateway.fakes import FakeTokenizer
from tests.services.gateway.media.asking import FILE, user
from tests.services.gateway.media.image_hosts import ImageHost
from tests.services.gateway.media.test_fetching import (
    CHAT,
    PLACE,
    asking,
    chat,
    host,
    served,
    tokenizer,
)
from tests.services.gateway.media.test_over_http import BODY, asked

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
__all__ = ["host", "tokenizer"]


async def test_images_are_fetched_for_each_api(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost
) -> None:
    url = f"http://127.0.0.1:{host.port}/a.png"
    block = {"type": "image", "source": {"type": "url", "url": url}}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    turn = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 5}
    async with asking(tmp_path, f"127.0.0.1:{host.port}") as ask:
        for path, body in ((CHAT, chat(url)), (MESSAGES, turn), (RESPONSES, {"input": [item]})):
            assert await served(tokenizer, ask(body, path)) == [FILE], path
        for path, body in (("/tokenize", chat(url)), (f"{MESSAGES}/count_tokens", turn)):
            status, reply = await ask(body, path)
            assert status == 200, reply
            assert [each.tobytes() for each in tokenizer.converted_files[-1]] == [FILE]
        counting = await ask({"input": [item]}, f"{RESPONSES}/input_tokens")
        assert counting[0] == 200, counting
    heads = {head.partition("\r\n")[2] for head in host.heads}
    assert len(host.heads) == 6
    for head in heads:
        assert "Accept-Encoding: identity" in head
        assert "Cookie" not in head
        assert "Authorization" not in head


async def test_errors_have_the_fields_of_each_api(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost
) -> None:
    url = f"http://127.0.0.1:{host.port}/missing"
    block = {"type": "image", "source": {"type": "url", "url": url}}
    turn = {"messages": [user({"type": "text", "text": "a"}, block)], "max_tokens": 5}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    async with asking(tmp_path, f"127.0.0.1:{host.port}") as ask:
        for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
            status, reply = await ask(turn, path)
            text = f'messages.0.content.1.source.url is "{url}"; its host answers 404'
            assert (status, reply["error"]["message"]) == (400, text)
        status, reply = await ask({"input": [item]}, RESPONSES)
        assert (status, reply["error"]["param"]) == (400, "input[0].content[0].image_url")
        status, reply = await ask(chat(url), "/tokenize")
        assert (status, reply["error"]["param"]) == (400, PLACE)


async def test_conversions_have_the_files_too(
    tokenizer: FakeTokenizer, http: aiohttp.ClientSession
) -> None:
    status, reply = await asked(http, "/tokenize", BODY)
    assert status == 200, reply
    [convert], [files] = tokenizer.converted, tokenizer.converted_files
    assert [each.tobytes() for each in files] == [FILE, b"other"]
    assert (len(convert.media), convert.media_options) == (2, '{"max_pixels": 9}')
