"""Requests of many inputs: the number in the mesh, waiting inputs, and ends of all."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from services.gateway.apis.pooling import schema as pooling_schema
from services.gateway.apis.pooling.parse import MAX_OPEN_INPUTS
from services.gateway.apis.pooling.scoring import parse_score
from services.gateway.service import GatewayService
from shared.errors import InvalidRequest
from shared.wire.envelope import read_options
from shared.wire.messages import Delta, Deltas, Finished, ModelInfo, PoolingInfo, RunKind, TokenRun
from shared.wire.token_arrays import TokenArrays
from tests.services.gateway.client import CHAT, HI, TEXT, Asked, Client, client_of, serving
from tests.services.gateway.fakes import (
    LIMITS,
    MODEL,
    NUM_PROMPT_TOKENS,
    Submitted,
    fake_tokenizer,
    until,
)

PATH = "/v1/embeddings"
TABLE = Path(__file__).parents[5] / "docs" / "pooling.md"
POOLING = PoolingInfo("embed", "mean", "normalize", 3, is_matryoshka=True)
EMBEDDER = msgspec.structs.replace(MODEL, runner="pooling", pooling=POOLING)


@asynccontextmanager
async def mesh(
    directory: Path, model: ModelInfo = EMBEDDER, **settings: Any
) -> AsyncIterator[Client]:
    async with (
        fake_tokenizer(directory, model=model) as tokenizer,
        serving(directory, **settings) as gateway,
        client_of(gateway, tokenizer) as client,
    ):
        yield client


def embed(client: Client, num: int, key: str = "", **body: Any) -> Asked:
    """Each text has 80 spaces before it in the body."""
    texts = [f"text {number}" for number in range(num)]
    data = json.dumps({"input": texts} | body, indent=80)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return asyncio.create_task(client.send("POST", PATH, data=data, headers=headers))


def number_of(request: Submitted) -> int:
    return int(request.submit.request.rpartition("/")[2])


def pool(request: Submitted) -> None:
    """Its vector holds the prompt's number, and arrives with the end."""
    run = TokenRun(1, 3, kind=RunKind.POOLED)
    row, end = Delta(*request.key, 0, 0, run), Finished(*request.key, 0, "length", 0)
    values = np.array([number_of(request), 0.5, -1], np.float32)
    arrays = TokenArrays(np.ones(1, np.int32), values, ranks=np.zeros(1, np.int32))
    request.peer.send(Deltas([row], [end]), *arrays)


async def answer(client: Client, num: int) -> list[Submitted]:
    """Answers the next ``num`` prompts in order: later ones arrive when these have ended."""
    requests = []
    for _ in range(num):
        requests.append(await client.tokenizer.accepted())
        pool(requests[-1])
    return requests


async def test_a_request_has_a_window_of_inputs_in_the_mesh(tmp_path: Path) -> None:
    num = MAX_OPEN_INPUTS + 40
    async with mesh(tmp_path) as client:
        asked = embed(client, num)
        submitted = client.tokenizer.submitted
        await until(lambda: submitted.qsize() == MAX_OPEN_INPUTS)
        await asyncio.sleep(0.05)
        assert submitted.qsize() == MAX_OPEN_INPUTS
        requests = await answer(client, num)
        assert sorted(map(number_of, requests)) == list(range(num))
        wanted = requests[0].submit.params.pooling
        assert (wanted.pooling_type, wanted.activation, wanted.num_dims) == ("mean", "normalize", 0)
        assert requests[0].submit.params.max_tokens == 0
        reply = await asked
        assert reply.status == 200
        vectors = [each["embedding"] for each in reply.json["data"]]
        assert vectors == [[i, 0.5, -1] for i in range(num)]
        assert reply.json["usage"]["prompt_tokens"] == num * NUM_PROMPT_TOKENS


async def test_an_input_that_finds_no_room_waits_once_others_were_accepted(tmp_path: Path) -> None:
    async with mesh(tmp_path) as client:
        asked = embed(client, MAX_OPEN_INPUTS + 1, encoding_format="base64")
        await answer(client, MAX_OPEN_INPUTS)
        last = await client.tokenizer.submitted.get()
        last.fail(429, "overloaded", "the queue is full", retry_after_s=0.01)
        (again,) = await answer(client, 1)
        assert (number_of(again), again.submit.attempt) == (MAX_OPEN_INPUTS, 2)
        reply = await asked
        assert reply.status == 200
        found = np.frombuffer(base64.b64decode(reply.json["data"][-1]["embedding"]), "<f4")
        assert found.tolist() == [MAX_OPEN_INPUTS, 0.5, -1]


async def test_without_room_for_its_first_inputs_a_request_is_refused(tmp_path: Path) -> None:
    async with mesh(tmp_path) as client:
        asked = embed(client, 3)
        first, second, third = [await client.tokenizer.submitted.get() for _ in range(3)]
        second.fail(429, "overloaded", "the queue is full", retry_after_s=3)
        assert (await asked).status == 429
        cancelled = await client.tokenizer.cancelled.get()
        assert {each.request for each in cancelled.keys} == {first.key[0], third.key[0]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"user": "ada", "colour": 1}, "user: it changes nothing here, colour: unknown, ignored"),
        ({"user": None, "endianness": "little", "encoding_format": "float"}, None),
    ],
)
async def test_fields_without_effect_are_named_in_a_header(
    tmp_path: Path, fields: Any, expected: str | None
) -> None:
    async with mesh(tmp_path) as client:
        reply = await client.served(answer(client, 1), PATH, input="a", **fields)
        assert reply.headers.get("X-Shoal-Warnings") == expected


async def test_an_error_in_one_input_names_it_and_ends_all(tmp_path: Path) -> None:
    async with mesh(tmp_path) as client:
        asked = embed(client, 3)
        first, second, third = [await client.tokenizer.accepted() for _ in range(3)]
        pool(first)
        second.fail(400, "context_length_exceeded", "it has 99 tokens", param="prompt")
        reply = await asked
        assert (reply.status, reply.error["param"]) == (400, "input[1]")
        assert reply.error["message"] == "input[1]: it has 99 tokens"
        cancelled = await client.tokenizer.cancelled.get()
        assert [each.request for each in cancelled.keys] == [third.key[0]]
        await until(lambda: is_idle(client.gateway))


async def test_a_client_that_leaves_takes_its_inputs_with_it(tmp_path: Path) -> None:
    async with mesh(tmp_path) as client:
        asked = embed(client, MAX_OPEN_INPUTS + 5)
        await client.tokenizer.accepted()
        asked.cancel()
        assert len((await client.tokenizer.cancelled.get()).keys) == MAX_OPEN_INPUTS
        await until(lambda: is_idle(client.gateway))
        await asyncio.sleep(0.05)
        assert client.tokenizer.submitted.qsize() == MAX_OPEN_INPUTS - 1


async def test_vectors_count_towards_the_gateways_memory(tmp_path: Path) -> None:
    large = msgspec.structs.replace(POOLING, size=4096)
    model = msgspec.structs.replace(EMBEDDER, pooling=large)
    async with mesh(tmp_path, model, max_buffered_bytes=1 << 20) as client:
        reply = await embed(client, 65)
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert "max-buffered-bytes = 1048576" in reply.error["message"]


def is_idle(gateway: GatewayService) -> bool:
    return gateway.status().load == 0 and gateway._admission._num_bytes == 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "queries", "beside text_1"),
        ({"queries": "a", "documents": "b", "text_2": "c"}, "text_2", "beside queries"),
        ({"documents": "b"}, "queries", "required"),
        ({"text_1": "a"}, "text_2", "required"),
    ],
)
def test_one_pair_of_fields_is_scored(fields: dict[str, str], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        parse_score(msgspec.json.encode(fields), EMBEDDER, LIMITS)
    assert error.value.param == param


def test_every_field_is_in_the_table() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    written = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row.split("|")[1])}
    kinds = [each for name, each in vars(pooling_schema).items() if name.endswith("Request")]
    fields = {name for kind in kinds for name in kind.__struct_fields__}
    assert fields | set(pooling_schema.NEUTRAL) <= written
    assert written - fields - set(pooling_schema.NEUTRAL) <= {"user"}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_model_that_pools_writes_no_texts(tmp_path: Path, path: str) -> None:
    async with mesh(tmp_path) as client:
        error = await client.refused(400, path, prompt="a", messages=HI)
        assert error["code"] == "model_does_not_generate"
        assert PATH in error["message"]


async def test_api_keys_are_checked_and_their_limits_hold(tmp_path: Path) -> None:
    async with mesh(tmp_path, api_key=["secret"], max_tokens_per_minute_per_key=1) as client:
        assert (await embed(client, 1)).status == 401
        asked = embed(client, 2, key="secret")
        requests = await answer(client, 2)
        assert read_options(requests[0].submit.options).owner
        assert (await asked).status == 200
        reply = await embed(client, 1, key="secret")
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
