"""/tokenize, /detokenize and /load."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from services.gateway.apis.tokenization import endpoint
from services.gateway.apis.tokenization.reply import PIECE_IDS, write_tokens
from services.gateway.mesh.mesh import Mesh
from shared.errors import InvalidRequest
from shared.link.peer import Peer
from shared.wire.messages import ChatOptions, Hello, RequestKey, State, Vocabulary
from tests.services.gateway.asking import tool
from tests.services.gateway.fakes import (
    DESCRIPTION,
    MODEL,
    FakeTokenizer,
    running_gateway,
    until,
)

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def post(http: aiohttp.ClientSession, path: str, body: Any, status: int = 200) -> Any:
    async with http.post(path, json=body) as response:
        assert response.status == status
        return await response.json()


async def test_a_text_has_ids_and_their_number(http: aiohttp.ClientSession) -> None:
    assert await post(http, "/tokenize", {"prompt": "\x06\x07"}) == {
        "count": 2,
        "max_model_len": MODEL.max_model_len,
        "tokens": [6, 7],
        "token_strs": None,
    }


async def test_the_tokens_are_written_where_the_client_asks(http: aiohttp.ClientSession) -> None:
    reply = await post(http, "/tokenize", {"prompt": "\x06\x01", "return_token_strs": True})
    assert reply["token_strs"] == [" w6", "\ufffd"]


@pytest.mark.parametrize(
    ("body", "kind", "adds_special_tokens"),
    [
        ({"prompt": "a"}, "text", True),
        ({"prompt": "a", "add_special_tokens": False}, "text", False),
        ({"messages": MESSAGES}, "chat", False),
        ({"messages": MESSAGES, "add_special_tokens": True}, "chat", True),
    ],
)
async def test_it_is_encoded_as_a_prompt_would_be(
    http: aiohttp.ClientSession,
    tokenizer: FakeTokenizer,
    body: Any,
    kind: str,
    adds_special_tokens: bool,
) -> None:
    reply = await post(http, "/tokenize", body)
    [convert] = tokenizer.converted
    assert (convert.kind, convert.adds_special_tokens) == (kind, adds_special_tokens)
    sent = b"a" if kind == "text" else json.dumps(MESSAGES).encode()
    assert reply["tokens"] == [byte % MODEL.vocab_size for byte in sent]


async def test_messages_go_through_the_template_with_all_that_it_gets(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    await post(http, "/tokenize", {"messages": MESSAGES})
    tools = [tool("f")]
    fields = {"tools": tools, "chat_template": "t", "chat_template_kwargs": {"x": 1}}
    body = {"messages": MESSAGES, "add_generation_prompt": False} | fields
    await post(http, "/tokenize", body)
    await post(http, "/tokenize", {"prompt": "a"})
    assert [each.chat for each in tokenizer.converted] == [
        ChatOptions(),
        ChatOptions(json.dumps(tools), "", '{"x":1}', "t", adds_generation_prompt=False),
        None,
    ]


async def test_a_text_is_cut_where_the_client_asks(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    for cut in ({}, {"truncate_prompt_tokens": 3}, {"truncate_prompt_tokens": -1}):
        await post(http, "/tokenize", {"prompt": "a", "truncation_side": "right"} | cut)
    asked = [(each.max_prompt_tokens, each.keeps_prompt_start) for each in tokenizer.converted]
    assert asked == [(None, True), (3, True), (MODEL.max_model_len, True)]


async def test_ids_have_a_text(http: aiohttp.ClientSession) -> None:
    assert await post(http, "/detokenize", {"tokens": [6, 1, 2]}) == {"prompt": " w6€"}
    assert await post(http, "/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "cat"}, "model"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools[0].function"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"x": 1}}, "prompt"),
        ("/tokenize", {"prompt": "a", "truncate_prompt_tokens": 9999}, "truncate_prompt_tokens"),
        ("/tokenize", {"prompt": "a", "truncation_side": "top"}, "truncation_side"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, MODEL.vocab_size]}, "tokens[1]"),
    ],
)
async def test_malformed_fields_are_named(
    http: aiohttp.ClientSession, path: str, body: Any, param: str
) -> None:
    status = 404 if param == "model" else 400
    assert (await post(http, path, body, status))["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "a"}, "prompt"),
        ("/tokenize", {"messages": MESSAGES}, "messages"),
        ("/detokenize", {"tokens": [1]}, "tokens"),
    ],
)
async def test_a_refusal_of_the_tokenizer_names_the_clients_field(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, path: str, body: Any, param: str
) -> None:
    tokenizer.conversion_error = InvalidRequest("too long", param="prompt")
    error = (await post(http, path, body, 400))["error"]
    assert (error["message"], error["param"]) == ("too long", param)


async def test_the_load_is_the_number_of_open_requests(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    async def load() -> Any:
        async with http.get("/load") as response:
            return await response.json()

    assert await load() == {"server_load": 0}
    posting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}).__aenter__())
    request = await tokenizer.accepted()
    assert await load() == {"server_load": 1}
    request.finish()
    (await posting).close()


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


async def test_more_ids_than_the_context_holds_are_no_text_of_ours(
    http: aiohttp.ClientSession,
) -> None:
    body = {"tokens": [1] * (MODEL.max_model_len + 1)}
    error = await post(http, "/detokenize", body, 400)
    assert f"the limit is max-model-len = {MODEL.max_model_len}" in error["error"]["message"]


async def test_a_conversion_is_cancelled_when_its_client_leaves(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    tokenizer.converts = False
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        asking = asyncio.create_task(post(http, path, body))
        await until(lambda: tokenizer.converted)
        asking.cancel()
        convert = tokenizer.converted.pop()
        cancel = await tokenizer.cancelled.get()
        assert cancel.keys == [RequestKey(convert.request, 0)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/completions", {"prompt": [6], "echo": True}),
    ],
)
async def test_a_conversion_that_is_not_answered_in_time_is_503_and_cancelled(
    tmp_path: Path, tokenizer: FakeTokenizer, path: str, body: Any
) -> None:
    tokenizer.converts = False
    async with running_gateway(tmp_path, accept_timeout_s=0.05) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            error = (await post(http, path, body, 503))["error"]
    assert "0.05 s" in error["message"]
    assert [each.request for each in (await tokenizer.cancelled.get()).keys] == [
        each.request for each in tokenizer.converted
    ]


async def test_a_finished_conversion_is_not_cancelled(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    await post(http, "/tokenize", {"prompt": "a"})
    tokenizer.conversion_error = InvalidRequest("too long", param="prompt")
    await post(http, "/tokenize", {"prompt": "a"}, 400)
    assert tokenizer.cancelled.empty()


async def test_a_text_of_more_tokens_than_the_context_holds_is_counted_but_not_spelled_out(
    http: aiohttp.ClientSession,
) -> None:
    text = "a" * (MODEL.max_model_len + 1)
    assert (await post(http, "/tokenize", {"prompt": text}))["count"] == len(text)
    messages = [{"role": "user", "content": text}]
    for field, value in (("prompt", text), ("messages", messages)):
        body = {field: value, "return_token_strs": True}
        error = (await post(http, "/tokenize", body, 400))["error"]
        assert error["param"] == field
        assert f"the limit is max-model-len = {MODEL.max_model_len}" in error["message"]


async def test_a_long_reply_is_made_in_pieces_beside_the_event_loop(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[threading.Thread] = set()
    num_pieces = 0

    def write(*args: Any) -> Iterator[bytes]:
        nonlocal num_pieces
        for piece in write_tokens(*args):
            threads.add(threading.current_thread())
            num_pieces += 1
            yield piece

    monkeypatch.setattr(endpoint, "write_tokens", write)
    text = "abcd" * PIECE_IDS
    reply = await post(http, "/tokenize", {"prompt": text})
    assert reply["tokens"] == [byte % MODEL.vocab_size for byte in text.encode()]
    assert num_pieces > 4
    assert threading.main_thread() not in threads


async def test_the_tokenizer_is_described_where_a_setting_allows_it(
    http: aiohttp.ClientSession, tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with http.get("/tokenizer_info") as response:
        assert response.status == 404
    async with (
        running_gateway(tmp_path, enable_tokenizer_info_endpoint=True) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        await until(lambda: gateway.status().state == State.READY)
        async with http.get("/tokenizer_info") as response:
            assert response.content_type == "application/json"
            assert await response.json() == DESCRIPTION
