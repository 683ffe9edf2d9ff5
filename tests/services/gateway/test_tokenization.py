"""/tokenize, /detokenize and /load."""

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from services.gateway.mesh import Mesh
from shared.errors import InvalidRequest
from shared.messages import Hello, Vocabulary
from shared.peer import Peer
from tests.services.gateway.fakes import MODEL, FakeTokenizer

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
    sent = b"a" if kind == "text" else json.dumps(MESSAGES, separators=(",", ":")).encode()
    assert reply["tokens"] == [byte % MODEL.vocab_size for byte in sent]


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
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, MODEL.vocab_size]}, "tokens[1]"),
    ],
)
async def test_what_is_wrong_is_named(
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
    mesh = Mesh(replay_s=0, ready_wait_s=0)
    for fingerprint, word in (("old", b"a"), ("new", b"b")):
        model = msgspec.structs.replace(MODEL, fingerprint=fingerprint)
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
