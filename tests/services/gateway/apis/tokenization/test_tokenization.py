"""/tokenize, /detokenize and /load."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from services.gateway.apis.tokenization import endpoint
from services.gateway.apis.tokenization.reply import PIECE_IDS, write_tokens
from services.gateway.mesh.mesh import Mesh
from shared.errors import InvalidRequest
from shared.link.peer import Peer
from shared.wire.messages import ChatOptions, Hello, RequestKey, Vocabulary
from tests.services.gateway.asking import tool
from tests.services.gateway.client import HI, TEXT, Client, with_settings
from tests.services.gateway.fakes import DESCRIPTION, MODEL, until

A_TEXT: Any = {"prompt": "a"}


async def tokenized(client: Client, **body: Any) -> Any:
    answer = await client.post("/tokenize", **body)
    assert answer.status == 200, answer.text
    return answer.json


async def test_a_text_has_ids_and_their_number(client: Client) -> None:
    assert await tokenized(client, prompt="\x06\x07") == {
        "count": 2,
        "max_model_len": MODEL.max_model_len,
        "tokens": [6, 7],
        "token_strs": None,
    }
    reply = await tokenized(client, prompt="\x06\x01", return_token_strs=True)
    assert reply["token_strs"] == [" w6", "\ufffd"]


@pytest.mark.parametrize(
    ("body", "kind", "adds_special_tokens"),
    [
        (A_TEXT, "text", True),
        (A_TEXT | {"add_special_tokens": False}, "text", False),
        ({"messages": HI}, "chat", False),
        ({"messages": HI, "add_special_tokens": True}, "chat", True),
    ],
)
async def test_it_is_encoded_as_a_prompt_would_be(
    client: Client, body: Any, kind: str, adds_special_tokens: bool
) -> None:
    reply = await tokenized(client, **body)
    [convert] = client.tokenizer.converted
    assert (convert.kind, convert.adds_special_tokens) == (kind, adds_special_tokens)
    sent = b"a" if kind == "text" else json.dumps(HI).encode()
    assert reply["tokens"] == [byte % MODEL.vocab_size for byte in sent]


async def test_messages_go_through_the_template_with_all_that_it_gets(client: Client) -> None:
    fields = {"tools": [tool("f")], "chat_template": "t", "chat_template_kwargs": {"x": 1}}
    await tokenized(client, messages=HI)
    await tokenized(client, messages=HI, add_generation_prompt=False, **fields)
    await tokenized(client, **A_TEXT)
    tools = json.dumps([tool("f")])
    assert [each.chat for each in client.tokenizer.converted] == [
        ChatOptions(),
        ChatOptions(tools, "", '{"x":1}', "t", adds_generation_prompt=False),
        None,
    ]


async def test_a_text_is_cut_where_the_client_asks(client: Client) -> None:
    for cut in ({}, {"truncate_prompt_tokens": 3}, {"truncate_prompt_tokens": -1}):
        await tokenized(client, **A_TEXT, truncation_side="right", **cut)
    converted = client.tokenizer.converted
    asked = [(each.max_prompt_tokens, each.keeps_prompt_start) for each in converted]
    assert asked == [(None, True), (3, True), (MODEL.max_model_len, True)]


async def test_ids_have_a_text(client: Client) -> None:
    for ids, text in (([6, 1, 2], " w6€"), ([], "")):
        assert (await client.post("/detokenize", tokens=ids)).json == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", A_TEXT | {"messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", A_TEXT | {"model": "cat"}, "model"),
        ("/tokenize", {"messages": HI, "tools": [{}]}, "tools[0].function"),
        ("/tokenize", A_TEXT | {"chat_template_kwargs": {"x": 1}}, "prompt"),
        ("/tokenize", A_TEXT | {"truncate_prompt_tokens": 9999}, "truncate_prompt_tokens"),
        ("/tokenize", A_TEXT | {"truncation_side": "top"}, "truncation_side"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, MODEL.vocab_size]}, "tokens[1]"),
    ],
)
async def test_malformed_fields_are_named(client: Client, path: str, body: Any, param: str) -> None:
    status = 404 if param == "model" else 400
    assert (await client.refused(status, path, **body))["param"] == param


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [("/tokenize", "prompt", "a"), ("/tokenize", "messages", HI), ("/detokenize", "tokens", [1])],
)
async def test_a_refusal_of_the_tokenizer_names_the_clients_field(
    client: Client, path: str, field: str, value: Any
) -> None:
    client.tokenizer.conversion_error = InvalidRequest("too long", param="prompt")
    error = await client.refused(400, path, **{field: value})
    assert (error["message"], error["param"]) == ("too long", field)
    assert client.tokenizer.cancelled.empty(), "it is over"


async def test_the_load_is_the_number_of_open_requests(client: Client) -> None:
    assert (await client.get("/load")).json == {"server_load": 0}
    asked, request = await client.accepted()
    assert (await client.get("/load")).json == {"server_load": 1}
    await client.finish(asked, request)


def test_after_a_change_of_model_tokens_are_written_as_the_new_one_writes_them() -> None:
    mesh = Mesh(replay_s=0, ready_wait_s=0, accept_timeout_s=1)
    for fingerprint, word in (("old", b"a"), ("new", b"b")):
        model = msgspec.structs.replace(MODEL, fingerprint=fingerprint, vocab_size=1)
        peer = Peer(Hello(1, 0, "tokenizer", fingerprint, model), lambda *_: None)
        mesh.on_up(peer)
        data, lengths = np.frombuffer(word, np.uint8), np.ones(1, np.int32)
        mesh.on_message(peer, Vocabulary(), [data, lengths])
        assert mesh.tokens.text(0) == word.decode()
        mesh.on_down(peer, "gone")


async def test_a_conversion_is_cancelled_when_its_client_leaves(client: Client) -> None:
    client.tokenizer.converts = False
    for path, body in (("/tokenize", A_TEXT), ("/detokenize", {"tokens": [1]})):
        asking = asyncio.create_task(client.post(path, **body))
        await until(lambda: client.tokenizer.converted)
        asking.cancel()
        convert = client.tokenizer.converted.pop()
        assert (await client.tokenizer.cancelled.get()).keys == [RequestKey(convert.request, 0)]


@with_settings(accept_timeout_s=0.05)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", A_TEXT),
        ("/detokenize", {"tokens": [1]}),
        (TEXT, {"prompt": [6], "echo": True}),
    ],
)
async def test_a_conversion_that_is_not_answered_in_time_is_503_and_cancelled(
    client: Client, path: str, body: Any
) -> None:
    client.tokenizer.converts = False
    assert "0.05 s" in (await client.refused(503, path, **body))["message"]
    cancelled = (await client.tokenizer.cancelled.get()).keys
    converted = client.tokenizer.converted
    assert [each.request for each in cancelled] == [each.request for each in converted]


async def test_a_finished_conversion_is_not_cancelled(client: Client) -> None:
    await tokenized(client, **A_TEXT)
    assert client.tokenizer.cancelled.empty()


async def test_more_tokens_than_the_context_holds_are_counted_but_not_spelled_out(
    client: Client,
) -> None:
    text = "a" * (MODEL.max_model_len + 1)
    assert (await tokenized(client, prompt=text))["count"] == len(text)
    spelled = {"return_token_strs": True}
    for path, field, value, more in (
        ("/tokenize", "prompt", text, spelled),
        ("/tokenize", "messages", [{"role": "user", "content": text}], spelled),
        ("/detokenize", "tokens", [1] * len(text), {}),
    ):
        error = await client.refused(400, path, **{field: value}, **more)
        assert error["param"] == field
        assert f"the limit is max-model-len = {MODEL.max_model_len}" in error["message"]


async def test_a_long_reply_is_made_in_pieces_beside_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def write(*args: Any) -> Iterator[bytes]:
        for piece in write_tokens(*args):
            threads.append(threading.current_thread())
            yield piece

    monkeypatch.setattr(endpoint, "write_tokens", write)
    text = "abcd" * PIECE_IDS
    reply = await tokenized(client, prompt=text)
    assert reply["tokens"] == [byte % MODEL.vocab_size for byte in text.encode()]
    assert len(threads) > 4
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("settings", "status"), [({}, 404), ({"enable_tokenizer_info_endpoint": True}, 200)]
)
async def test_the_tokenizer_is_described_where_a_setting_allows_it(
    client: Client, status: int
) -> None:
    answer = await client.get("/tokenizer_info")
    assert answer.status == status
    if status == 200:
        assert answer.headers["Content-Type"].startswith("application/json")
        assert answer.json == DESCRIPTION
