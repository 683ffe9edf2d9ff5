"""The times that the server, an API key and a request may set; the scheduler gets the narrowest."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from services.gateway.apis.responses.requests.parse import read_request, response_job
from services.gateway.chat.requests.parse import Limits, parse_completion
from services.gateway.mesh.job import Job
from shared.errors import ConfigError, InvalidRequest
from shared.wire.envelope import Promise, read_options
from tests.services.gateway.apis.batches.test_batches import batch_file, body, start
from tests.services.gateway.apis.messages import asking
from tests.services.gateway.asking import chat, completion
from tests.services.gateway.client import HI, TEXT, serving
from tests.services.gateway.client import client_of as http_client_of
from tests.services.gateway.fakes import LIMITS, MODEL, FakeTokenizer, running_gateway
from tests.services.gateway.openai_client import client_of, clients, gateway_of


def response(**fields: Any) -> Job:
    request = read_request(json.dumps({"input": "Hi"} | fields).encode())
    return response_job(request, request.items, lambda content: None, MODEL, LIMITS)


def message(**fields: Any) -> Job:
    return asking.parsed(**fields).job


@pytest.mark.parametrize("parse", [chat, completion, response, message])
@pytest.mark.parametrize(
    ("slo", "param", "words"),
    [
        (20, "slo", "20; expected object"),
        ({"tpot_ms": 0}, "slo.tpot_ms", "0; expected float > 0"),
        ({"ttft_ms": -1.5}, "slo.ttft_ms", "-1.5; expected float > 0"),
        ({"ttft_ms": 86_400_001}, "slo.ttft_ms", "86400001; expected float <= 86400000"),
        ({"tpot_ms": "20"}, "slo.tpot_ms", '"20"; expected float'),
        ({"tpot_ms": True}, "slo.tpot_ms", "true; expected float"),
        ({"tpot": 20}, "slo.tpot", "is not a field of this object"),
    ],
)
def test_a_wrong_time_is_refused_with_field_value_and_limit(
    parse: Callable[..., Job], slo: Any, param: str, words: str
):
    with pytest.raises(InvalidRequest) as error:
        parse(slo=slo)
    assert error.value.param == param
    assert param in error.value.message
    assert words in error.value.message


@pytest.mark.parametrize("parse", [chat, completion, response, message])
def test_without_any_setting_a_request_has_the_times_it_asks_for(parse: Callable[..., Job]):
    assert parse(slo={"tpot_ms": 0.5}).options.promise == Promise(tpot_ms=0.5)
    both = {"ttft_ms": 86_400_000, "tpot_ms": 20}
    assert parse(slo=both).options.promise == Promise(ttft_ms=86_400_000.0, tpot_ms=20.0)
    assert parse().options.promise is None
    for nothing in (None, {}, {"ttft_ms": None}):
        assert parse(slo=nothing).options.promise is None


STANDING = Promise(ttft_ms=500.0, tpot_ms=25.0)


def promised(standing: Promise, **fields: Any) -> Promise | None:
    limits = Limits(max_choices=1, max_logprobs=0, max_priority_boost=5, promise=standing)
    text = json.dumps({"prompt": "a"} | fields).encode()
    return parse_completion(text, MODEL, limits).options.promise


@pytest.mark.parametrize(
    ("standing", "fields", "promise"),
    [
        (STANDING, {}, STANDING),
        (STANDING, {"slo": {"tpot_ms": 25}}, STANDING),
        (STANDING, {"slo": {"tpot_ms": 40}}, Promise(ttft_ms=500.0, tpot_ms=40.0)),
        (Promise(ttft_ms=500.0), {"slo": {"tpot_ms": 1}}, Promise(ttft_ms=500.0, tpot_ms=1.0)),
        (STANDING, {"priority": -5}, STANDING),
        (STANDING, {"priority": 1}, None),
        (STANDING, {"priority": 100, "slo": {"tpot_ms": 40}}, Promise(tpot_ms=40.0)),
    ],
)
def test_the_request_comes_before_the_standing_promise(
    standing: Promise, fields: dict[str, Any], promise: Promise | None
):
    assert promised(standing, **fields) == promise


@pytest.mark.parametrize("priority", [0, 100])
def test_a_shorter_time_than_the_standing_promise_is_refused(priority: int):
    for name, own, words in (
        ("ttft_ms", 499.5, "slo.ttft_ms is 499.5; the shortest time is 500 (ttft-ms)"),
        ("tpot_ms", 24, "slo.tpot_ms is 24; the shortest time is 25 (tpot-ms)"),
    ):
        with pytest.raises(InvalidRequest) as error:
            promised(STANDING, priority=priority, slo={name: own})
        assert error.value.param == f"slo.{name}"
        assert error.value.message == words


SERVER: Any = {"ttft_ms": 500.0, "tpot_ms": 25.0}
FILE = "own tpot-ms=10.5\nfree  ttft-ms=none tpot-ms=none\nplain max-open-requests=4\n"
OF_KEYS = {
    "own": Promise(ttft_ms=500.0, tpot_ms=10.5),
    "free": None,
    "plain": STANDING,
    "other": STANDING,
}
"""``other`` is a key of the settings."""


async def ask(client: AsyncOpenAI, way: str, more: dict[str, Any]) -> None:
    match way:
        case "completion":
            await client.completions.create(**body(), extra_body=more)
        case "chat":
            await client.chat.completions.create(model="fish", messages=HI, extra_body=more)
        case "response":
            await client.responses.create(model="fish", input="Hi", extra_body=more)
        case "background":
            await client.responses.create(
                model="fish", input="Hi", background=True, extra_body=more
            )
        case "message":
            fields = {"model": "fish", "messages": HI, "max_tokens": 2}
            await client.post("/messages", body=fields | more, cast_to=object)
        case "batch":
            await start(client, batch_file(1, body=body() | more))


@pytest.mark.parametrize(
    "way",
    [
        *("completion", "response", "batch"),
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("chat", "background", "message")),
    ],
)
async def test_each_way_of_asking_has_the_promise_of_its_key(
    tmp_path: Path, tokenizer: FakeTokenizer, way: str
):
    """A batch has none but in its lines."""
    path = tmp_path / "keys"
    path.write_text(FILE)
    settings = SERVER | {"api_key_file": path, "api_key": ["other"]}
    own = Promise(tpot_ms=90.0)
    async with gateway_of(tmp_path, **settings, response_store=tmp_path / "store.db") as gateway:
        for key, standing in OF_KEYS.items():
            merged = Promise(ttft_ms=standing.ttft_ms, tpot_ms=90.0) if standing else own
            expected: list[tuple[dict[str, Any], Promise | None]] = [
                ({}, None if way == "batch" else standing),
                ({"slo": {"tpot_ms": 90}}, own if way == "batch" else merged),
            ]
            for more, promise in expected:
                async with client_of(gateway, key) as client:
                    asking = asyncio.create_task(ask(client, way, more))
                    submitted = await tokenizer.answer("x")
                    await asking
                assert read_options(submitted.submit.options).promise == promise


async def test_without_keys_the_promise_of_the_server_applies(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with clients(tmp_path, **SERVER) as client:
        asking = asyncio.create_task(ask(client, "chat", {"slo": {"ttft_ms": 900}}))
        submitted = await tokenizer.answer("x")
        await asking
    promise = read_options(submitted.submit.options).promise
    assert promise == Promise(ttft_ms=900.0, tpot_ms=25.0)


async def test_a_key_may_not_ask_for_less_than_its_own_promise(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    path = tmp_path / "keys"
    path.write_text(FILE)
    settings = SERVER | {"api_key_file": path, "api_key": ["other"]}
    async with (
        serving(tmp_path, **settings) as gateway,
        http_client_of(gateway, tokenizer) as client,
    ):
        error = await client.refused(400, TEXT, key="own", prompt="a", slo={"tpot_ms": 10})
        assert error["param"] == "slo.tpot_ms"
        assert error["message"] == "slo.tpot_ms is 10; the shortest time is 10.5 (tpot-ms)"
        _, request = await client.answered(TEXT, key="free", prompt="a", slo={"tpot_ms": 1})
        assert read_options(request.submit.options).promise == Promise(tpot_ms=1.0)


@pytest.mark.parametrize("value", ["0", "-1", "fast", "", "1e3", "86400001", "inf", "0.0000001"])
async def test_a_wrong_time_in_the_file_is_refused(tmp_path: Path, value: str):
    path = tmp_path / "keys"
    path.write_text(f"good\nsecret tpot-ms={value}\n")
    with pytest.raises(ConfigError) as error:
        async with running_gateway(tmp_path, api_key_file=path):
            pass
    words = f"line 2: tpot-ms is '{value}'; expected milliseconds above 0, up to 86400000, or none"
    assert words in str(error.value)
