"""Images in Anthropic's messages and OpenAI's responses: the chat, the files, and the client's
names in errors."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.apis.messages.requests.parse import parse_messages
from services.gateway.apis.responses.requests.input_items import kept_input
from services.gateway.apis.responses.requests.parse import read_request, response_job
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo
from tests.services.gateway.client import Client, with_settings
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.media.asking import (
    FILE,
    SEER,
    data_url,
    files_of,
    limits,
    messages_of,
    user,
)

DATA = base64.b64encode(FILE).decode()
TEXT = {"type": "text", "text": "Describe it."}
BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": DATA},
    "cache_control": {"type": "ephemeral"},
}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
ITEM = {"type": "input_image", "image_url": data_url(), "detail": "high"}
WORDS = {"type": "input_text", "text": "Describe it."}
REFERENCES = [{"type": "image", "media": number} for number in range(4)]


def messages_job(*turns: Any, model=SEER, **settings: Any) -> Job:
    body = {"model": "fish", "max_tokens": 4, "messages": [*turns]}
    return parse_messages(json.dumps(body).encode(), model, limits(**settings)).job


def response_of(*items: Any, before: tuple[Any, ...] = (), **settings: Any) -> Job:
    asked = limits(**settings)
    request = read_request(json.dumps({"input": [*items]}).encode(), asked.media)
    earlier = [json.dumps(each).encode() for each in before]
    return response_job(request, [*earlier, *request.items], lambda text: None, SEER, asked)


def refused(make, *args: Any, **more: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        make(*args, **more)
    return caught.value


# --- messages -----------------------------------------------------------------------------------


def test_blocks_with_images_are_parts_of_a_chat() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT, BLOCK, TEXT, TEXT]}
    job = messages_job(
        user(BLOCK, TEXT, TEXT, BLOCK),
        {"role": "user", "content": "More."},
        {"role": "assistant", "content": [USE]},
        user(result, TEXT),
    )
    [prompt] = job.prompts
    two = {"type": "text", "text": "Describe it.\nDescribe it."}
    chat = messages_of(prompt)
    assert [each["role"] for each in chat] == ["user", "assistant", "tool", "user"]
    more = {"type": "text", "text": "More."}
    assert chat[0]["content"] == [REFERENCES[0], two, REFERENCES[1], more]
    assert chat[2]["content"] == [TEXT, REFERENCES[2], two]
    assert chat[3]["content"] == "Describe it."
    assert files_of(prompt) == [FILE] * 3
    assert job.field_names[prompt.media[2].medium.param] == (
        "messages[3].content[0].content[1].source.data"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([BLOCK], [{"type": "text", "text": "Error: "}, REFERENCES[0]]),
        ([TEXT, BLOCK], [{"type": "text", "text": "Error: Describe it."}, REFERENCES[0]]),
        ([TEXT], "Error: Describe it."),
        ([], "Error: "),
    ],
)
def test_an_error_with_an_image_is_called_one(content: list[Any], expected: Any) -> None:
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": content, "is_error": True}
    hello, use = user(TEXT), {"role": "assistant", "content": [USE]}
    [prompt] = messages_job(hello, use, user(failed)).prompts
    assert messages_of(prompt)[2]["content"] == expected


@pytest.mark.parametrize(
    ("source", "param", "text"),
    [
        (
            {"type": "url", "url": "https://a.example"},
            "source.url",
            "nothing is fetched (allowed-media-domains), expected",
        ),
        ({"type": "url", "url": None}, "source.url", "is null; expected str"),
        ({"type": "url", "url": {"url": data_url()}}, "source.url", "expected str"),
        ({"type": "url"}, "source.url", "is required"),
        ({"type": "file", "file_id": 5}, "source.file_id", "is 5; expected the id of a file"),
        ({"type": "file"}, "source.file_id", "is required"),
        (BLOCK["source"] | {"media_type": "image/tiff"}, "source.media_type", "image/jpeg, image/"),  # type: ignore[operator]
        (BLOCK["source"] | {"data": "QUJ"}, "source.data", "is not base64: incorrect padding"),  # type: ignore[operator]
        (BLOCK["source"] | {"data": ""}, "source.data", "has no data"),  # type: ignore[operator]
        (BLOCK["source"] | {"data": 5}, "source.data", "is 5; expected str"),  # type: ignore[operator]
    ],
)
def test_a_bad_source_is_named_as_the_client_names_it(source: Any, param: str, text: str) -> None:
    turns = user(TEXT), {"role": "user", "content": [TEXT, {"type": "image", "source": source}]}
    error = refused(messages_job, *turns)
    assert error.param == f"messages[1].content[1].{param}"
    assert error.message.startswith(error.param)
    assert text in error.message


def test_limits_of_images_in_messages() -> None:
    error = refused(messages_job, user(TEXT), user(BLOCK, BLOCK), limit_mm_per_prompt={"image": 1})
    assert error.param == "messages[1].content[1]"
    error = refused(messages_job, user(BLOCK), model=MODEL)
    assert error.message == 'messages[0].content[0].type is "image"; the model fish takes no images'
    for bad in ({"role": "assistant", "content": [BLOCK]}, {"role": "system", "content": [BLOCK]}):
        error = refused(messages_job, user(TEXT), bad)
        assert error.param == "messages[1].content[0].type"
        assert "not supported" in error.message


# --- responses ----------------------------------------------------------------------------------


def test_items_with_images_are_parts_of_a_chat() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [WORDS, ITEM]}
    job = response_of(
        {"role": "developer", "content": "Look."},
        {"role": "developer", "content": [WORDS, ITEM]},
        {"role": "user", "content": [ITEM]},
        call,
        output,
        before=({"type": "message", "role": "user", "content": [ITEM, WORDS]},),
    )
    [prompt] = job.prompts
    chat = messages_of(prompt)
    assert [each["content"] for each in chat] == [
        [REFERENCES[0], TEXT],
        "Look.",
        [TEXT, REFERENCES[1]],
        [REFERENCES[2]],
        None,
        [TEXT, REFERENCES[3]],
    ]
    assert chat[5]["role"] == "tool"
    assert files_of(prompt) == [FILE] * 4
    assert {each.medium.detail for each in prompt.media} == {"high"}
    names = ["previous_response_id", "input[1].content", "input[2].content", "input[4].output"]
    contents = [each.medium.param.rpartition("[")[0] for each in prompt.media]
    assert [job.field_names[each] for each in contents] == names


def test_kept_items_have_their_images() -> None:
    body = json.dumps({"input": [{"role": "user", "content": [ITEM, WORDS]}]}).encode()
    [kept] = msgspec.json.decode(kept_input(read_request(body, limits().media).items, "k"))
    assert kept["content"] == [ITEM, WORDS]


@pytest.mark.parametrize(
    ("items", "param", "text"),
    [
        ([user(WORDS | {"type": "input_text"}), user(ITEM | {"image_url": "https://a.example"})],
         "input[1].content[0].image_url", "nothing is fetched (allowed-media-domains)"),
        ([user(ITEM | {"file_id": "f"})], "input[0].content[0].image_url", "is given in addition"),
        ([user({"type": "input_image"})], "input[0].content[0].image_url", "is required"),
        ([user(ITEM | {"detail": "best"})], "input[0].content[0].detail", "expected one of auto"),
        ([{"role": "assistant", "content": [ITEM]}], "input[0].content[0]", "of role assistant"),
        ([{"type": "reasoning", "summary": [ITEM]}], "input[0].summary[0].type", "not supported"),
    ],
)  # fmt: skip
def test_a_bad_image_is_named_as_the_client_names_it(
    items: list[Any], param: str, text: str
) -> None:
    error = refused(response_of, *items)
    assert error.param == param
    assert error.message.startswith(param)
    assert text in error.message


# --- over HTTP ----------------------------------------------------------------------------------


@pytest.fixture
def model() -> ModelInfo:
    return SEER


@with_settings(response_store=Path("store"))
async def test_a_stored_conversation_keeps_its_images(client: Client) -> None:
    async def ask(**body: Any) -> tuple[Any, list[bytes]]:
        answer, request = await client.answered("/v1/responses", "a", **body)
        return answer.json, [each.tobytes() for each in request.files]

    reply, files = await ask(input=[user(ITEM, WORDS)])
    assert files == [FILE]
    _, files = await ask(input="And now?", previous_response_id=reply["id"])
    assert files == [FILE]
    [item] = (await client.get(f"/v1/responses/{reply['id']}/input_items")).json["data"]
    assert item["content"] == [ITEM, WORDS]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"messages": [user(BLOCK)]}),
        ("/v1/responses/input_tokens", {"input": [user(ITEM)]}),
    ],
)
async def test_all_counts_have_the_files(client: Client, path: str, body: Any) -> None:
    answer = await client.post(path, **body)
    assert answer.status == 200, answer.text
    [[file]] = client.tokenizer.converted_files
    assert file.tobytes() == FILE


async def test_the_list_of_models_has_their_modalities(client: Client) -> None:
    models = (await client.get("/v1/models")).json["data"]
    assert [each["input_modalities"] for each in models] == [["text", "image"]] * 2
