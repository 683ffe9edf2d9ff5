"""The cost of every body is bounded; ``test_stalls.py`` has the times."""

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from services.gateway.chat.requests.schema import MAX_PARTS
from services.tokenizer.chat.normalize import normalize
from services.tokenizer.chat.template_traits import TemplateTraits
from services.tokenizer.prepare import chat_messages
from shared.errors import InvalidRequest
from shared.text.long_json import MAX_VALUES
from tests.hostile import shapes
from tests.hostile.parsing import parse, prompts_of
from tests.hostile.shapes import SHAPES, Shape

BODY_BYTES = 2 << 20
MAX_GROWTH = 5  # times the body: two services hold it as JSON and as text


def read(path: str, body: bytes) -> list[Any]:
    """The messages a tokenizer's templates get of a chat."""
    prompts = prompts_of(parse(path, body))
    return [
        normalize(chat_messages(each.data), TemplateTraits())
        for each in prompts
        if each.kind == "chat"
    ]


def chat(*messages: Any) -> bytes:
    return json.dumps({"max_tokens": 1, "messages": messages}).encode()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_body_becomes_more_objects_than_its_bytes_pay_for(shape: Shape) -> None:
    body = shape.body(BODY_BYTES)
    tracemalloc.start()
    try:
        with suppress(InvalidRequest):
            read(shape.path, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= MAX_GROWTH * len(body)


CALL = {"type": "function", "id": "a", "function": {"name": "a", "arguments": "{}"}}
PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("path", "messages"),
    [
        (shapes.CHAT, [{"role": "user", "content": [PART] * 8}] * (MAX_PARTS // 8)),
        (shapes.CHAT, [{"role": "assistant", "tool_calls": [CALL] * 8}] * (MAX_PARTS // 8)),
        (shapes.MESSAGES, [{"role": "user", "content": [PART] * 8}] * (MAX_PARTS // 8)),
    ],
    ids=["parts", "calls", "blocks"],
)
def test_parts_calls_and_blocks_are_counted_over_all_messages(path: str, messages: Any) -> None:
    assert read(path, chat(*messages))
    more = {"role": "user", "content": [PART]}
    with pytest.raises(
        InvalidRequest, match=r"^messages has 16385 .*; the limit is 16384$"
    ) as error:
        parse(path, chat(*messages, more))
    assert error.value.param == "messages"


def test_parts_of_items_are_counted_over_the_whole_input() -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 8}
    items = [item] * (MAX_PARTS // 8)
    assert parse(shapes.RESPONSES, json.dumps({"input": items}).encode())
    with pytest.raises(InvalidRequest, match=r"^input has 16392 .*; the limit is 16384$"):
        parse(shapes.RESPONSES, json.dumps({"input": [*items, item]}).encode())


def test_names_and_values_are_counted_over_all_messages() -> None:
    message = {"role": "user", "content": "a", "x": [0] * 1000}
    [messages] = read(shapes.CHAT, chat(*[message] * 260))
    assert messages[-1]["x"] == message["x"]
    words = f"^messages has more than {MAX_VALUES} names and values; the limit is {MAX_VALUES}$"
    with pytest.raises(InvalidRequest, match=words) as error:
        parse(shapes.CHAT, chat(*[message] * 262))
    assert error.value.param == "messages"


def test_arguments_that_are_texts_are_counted_over_all_calls() -> None:
    function = {"name": "a", "arguments": json.dumps({"a": [0] * 1000})}
    message = {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}
    [messages] = read(shapes.CHAT, chat(*[message] * 260))
    assert messages[-1]["tool_calls"][0]["function"]["arguments"] == {"a": [0] * 1000}
    with pytest.raises(InvalidRequest, match=f"the limit is {MAX_VALUES}$"):
        read(shapes.CHAT, chat(*[message] * 264))


@pytest.mark.parametrize("num_bytes", [1, 200_000])
def test_fields_that_only_a_template_knows_arrive_as_they_were_sent(num_bytes: int) -> None:
    message = {
        "role": "user",
        "content": "a" * num_bytes,
        "name": "Ann",
        "x": {"y": [1, 2.5, None, "ü"]},
        "reasoning_content": "b" * num_bytes,
    }
    [[found]] = read(shapes.CHAT, chat(message))
    assert found == message | {"reasoning": message["reasoning_content"]}


def test_a_number_of_any_length_is_the_requests_own_error() -> None:
    message = b'{"role":"user","content":"a","x":1' + b"1" * 300_000 + b"}"
    with pytest.raises(InvalidRequest):
        read(shapes.CHAT, b'{"messages":[' + message + b"]}")
    with pytest.raises(InvalidRequest, match=r"^prompt\[1\] is 11"):
        parse(shapes.TEXT, b'{"prompt":[1,1' + b"1" * 300_000 + b"]}")


def test_a_text_of_bytes_that_are_no_utf8_is_no_json() -> None:
    body = b'{"messages":[{"role":"user","content":"\xff"}]}'
    with pytest.raises(InvalidRequest) as error:
        parse(shapes.CHAT, body)
    assert error.value.code == "invalid_json"


@pytest.mark.parametrize(
    "body",
    [
        b" " * 100_000,
        b"[" + b" " * 100_000 + b"]",
        b'{"messages":[{"role":"user","content":"a"},]}' + b" " * 100_000,
        b'{"messages":[{"role":"assistant","content":"' + b"a" * 300_000 + rb'\q"}],"echo":true}',
        b'{"messages":[{"role":"user","content":"' + b"a" * 300_000 + b'"}]]',
        b'{"messages":[{"role":"user","content":"' + b"a" * 300_000 + b'"}}}',
    ],
    ids=["blanks", "a list", "a comma", "an escape", "a bracket", "a brace"],
)
def test_long_bodies_that_are_no_json_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(shapes.CHAT, body)
