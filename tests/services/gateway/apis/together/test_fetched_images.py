"""Images in the requests of every API, inside and from other hosts."""

from typing import Any

from tests.services.gateway.client import CHAT, Client, with_model
from tests.services.gateway.media.asking import FILE, SEER, user
from tests.services.gateway.media.image_hosts import ImageHost
from tests.services.gateway.media.test_fetching import (
    PLACE,
    at,
    chat,
    domains,
    host,
    more,
    settings,
)
from tests.services.gateway.media.test_over_http import BODY

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
__all__ = ["domains", "host", "more", "settings"]

pytestmark = with_model(SEER)


def bodies_of(url: str) -> dict[str, Any]:
    """A body for each API."""
    block = {"type": "image", "source": {"type": "url", "url": url}}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    turn = {"messages": [user({"type": "text", "text": "a"}, block)], "max_tokens": 5}
    return {CHAT: chat(url), MESSAGES: turn, RESPONSES: {"input": [item]}}


async def test_images_are_fetched_for_each_api(client: Client, host: ImageHost) -> None:
    bodies = bodies_of(at(host))
    for path, body in bodies.items():
        _, request = await client.answered(path, "a", **body)
        assert [each.tobytes() for each in request.files] == [FILE], path
    for path, api in (("/tokenize", CHAT), (f"{MESSAGES}/count_tokens", MESSAGES)):
        answer = await client.post(path, **bodies[api])
        assert answer.status == 200, answer.text
        assert [each.tobytes() for each in client.tokenizer.converted_files[-1]] == [FILE]
    assert (await client.post(f"{RESPONSES}/input_tokens", **bodies[RESPONSES])).status == 200
    assert len(host.heads) == 6
    for head in host.heads:
        assert "Accept-Encoding: identity" in head
        assert "Cookie" not in head
        assert "Authorization" not in head


async def test_errors_have_the_fields_of_each_api(client: Client, host: ImageHost) -> None:
    url = at(host, "/missing")
    bodies = bodies_of(url)
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        answer = await client.post(path, **bodies[MESSAGES])
        text = f'messages.0.content.1.source.url is "{url}"; its host answers 404'
        assert (answer.status, answer.json["error"]["message"]) == (400, text)
    error = await client.refused(400, RESPONSES, **bodies[RESPONSES])
    assert error["param"] == "input[0].content[0].image_url"
    assert (await client.refused(400, "/tokenize", **bodies[CHAT]))["param"] == PLACE


async def test_conversions_have_the_files_too(client: Client) -> None:
    answer = await client.post("/tokenize", **BODY)
    assert answer.status == 200, answer.text
    [convert], [files] = client.tokenizer.converted, client.tokenizer.converted_files
    assert [each.tobytes() for each in files] == [FILE, b"other"]
    assert (len(convert.media), convert.media_options) == (2, '{"max_pixels": 9}')
