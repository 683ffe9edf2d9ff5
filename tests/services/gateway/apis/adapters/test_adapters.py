"""Adapters as names of models, and their loading and unloading."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.gateway.apis.adapters.endpoint import LOAD, UNLOAD, AdapterApi
from services.gateway.service import GatewayService
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.envelope import read_options
from shared.wire.messages import Adapter, Adapters, LoadAdapter, Message, PoolingInfo, UnloadAdapter
from tests.services.gateway.client import (
    CHAT,
    HI,
    TEXT,
    Asked,
    Client,
    client_of,
    serving,
    with_settings,
)
from tests.services.gateway.fakes import (
    MODEL,
    FakeTokenizer,
    Submitted,
    fake_tokenizer,
    running_gateway,
    until,
)

SQL = Adapter(name="sql", digest="1" * 32, loaded_s=1.0, path="teams/sql-v1", load="l0")
LAW = Adapter(name="law", digest="2" * 32, loaded_s=1.0)
NEWER = replace(SQL, digest="3" * 32, loaded_s=2.0)


def orders_of(tokenizer: FakeTokenizer) -> list[Any]:
    """Will have the orders that come from now on."""
    orders: list[Message] = []
    receive = tokenizer.on_message

    def on_message(peer: Peer, message: Message, arrays: list[Array]) -> None:
        if isinstance(message, LoadAdapter | UnloadAdapter):
            orders.append(message)
        receive(peer, message, arrays)

    tokenizer.on_message = on_message  # type: ignore[method-assign]
    return orders


def send(tokenizer: FakeTokenizer, *adapters: Adapter) -> None:
    for peer in tokenizer.link.peers:
        peer.send(Adapters(list(adapters)))


def api_of(gateway: GatewayService) -> AdapterApi:
    return next(each for each in gateway._apis if isinstance(each, AdapterApi))


async def known(gateway: GatewayService, *adapters: Adapter) -> None:
    names = {each.name for each in adapters}
    await until(lambda: {*api_of(gateway)._known.by_name} == names)


@asynccontextmanager
async def knowing(
    folder: Path, tokenizer: FakeTokenizer, *adapters: Adapter, **settings: Any
) -> AsyncIterator[Client]:
    """A gateway that knows ``adapters``."""
    async with serving(folder, **settings) as gateway, client_of(gateway, tokenizer) as client:
        send(tokenizer, *adapters)
        await known(gateway, *adapters)
        yield client


def digest_of(request: Submitted) -> str:
    return read_options(request.submit.options).adapter


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"model": "sql"}, "sql"),
        ({"model": "fish:sql"}, "fish:sql"),
        ({"model": "fish", "lora_path": "sql"}, "sql"),
        ({"lora_path": "sql"}, "sql"),
    ],
)
async def test_a_request_names_an_adapter_and_its_reply_does_too(
    tmp_path: Path, tokenizer: FakeTokenizer, fields: Any, shown: str
):
    async with knowing(tmp_path, tokenizer, SQL, LAW) as client:
        answer, asked = await client.answered(CHAT, "Hello", messages=HI, **fields)
        assert digest_of(asked) == SQL.digest
        assert answer.json["model"] == shown
        assert answer.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "fields", [{}, {"model": "org/fish"}, {"model": "fish", "lora_path": None}]
)
async def test_the_model_itself_has_no_adapter(
    tmp_path: Path, tokenizer: FakeTokenizer, fields: Any
):
    async with knowing(tmp_path, tokenizer, SQL) as client:
        _, asked = await client.answered(CHAT, "Hello", messages=HI, **fields)
        assert digest_of(asked) == ""


@pytest.mark.parametrize("name", ["law", "sql:fish", "fish:law", "sql:sql", "fish:org/fish"])
async def test_another_name_is_404_with_the_names_that_exist(
    tmp_path: Path, tokenizer: FakeTokenizer, name: str
):
    async with knowing(tmp_path, tokenizer, SQL) as client:
        error = await client.refused(404, CHAT, messages=HI, model=name)
        assert error["code"] == "model_not_found"
        assert "fish, org/fish, sql" in error["message"]


async def test_a_request_goes_to_a_tokenizer_that_knows_its_adapter(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with fake_tokenizer(tmp_path, "t2") as other, knowing(tmp_path, tokenizer, SQL) as client:
        await until(lambda: len(client.gateway._mesh.tokenizers) == 2)
        send(other, LAW)
        await known(client.gateway, SQL, LAW)
        for name, expected in (("sql", tokenizer), ("law", other)) * 3:
            await client.served(expected.answer("Hello"), TEXT, prompt="a", model=name)


async def test_a_replay_keeps_the_adapter_that_the_name_stood_for(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with knowing(tmp_path, tokenizer, SQL) as client:
        gateway = client.gateway
        async with fake_tokenizer(tmp_path, "t2") as other:
            await until(lambda: len(gateway._mesh.tokenizers) == 2)
            send(tokenizer, LAW)
            await known(gateway, LAW)
            send(other, SQL)
            await known(gateway, LAW, SQL)
            asked = asyncio.create_task(client.post(TEXT, prompt="a", model="sql"))
            (await other.accepted()).text("He")
        await until(lambda: len(gateway._mesh.tokenizers) == 1)
        await asyncio.sleep(0.2)
        assert tokenizer.submitted.empty(), "it waits for a tokenizer that knows the adapter"
        send(tokenizer, NEWER, replace(SQL, is_retired=True))
        again = await tokenizer.accepted()
        assert digest_of(again) == SQL.digest
        again.num_sent[0] = 1
        again.text("llo")
        assert (await client.finish(asked, again)).choices[0]["text"] == "Hello"


async def test_a_replay_whose_adapter_is_nowhere_fails_in_the_end(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with knowing(tmp_path, tokenizer, LAW, replay_s=0.3) as client:
        async with fake_tokenizer(tmp_path, "t2") as other:
            await until(lambda: len(client.gateway._mesh.tokenizers) == 2)
            send(other, SQL)
            await known(client.gateway, LAW, SQL)
            asked = asyncio.create_task(client.post(CHAT, messages=HI, model="sql"))
            await other.accepted()
        answer = await asked
        assert (answer.status, answer.error["code"]) == (503, "adapter_lost")


async def test_models_that_pool_have_no_adapters(tmp_path: Path):
    model = replace(MODEL, runner="pooling", pooling=PoolingInfo("embed", "last", "none", 4))
    async with (
        fake_tokenizer(tmp_path, model=model) as tokenizer,
        knowing(tmp_path, tokenizer, SQL) as client,
    ):
        error = await client.refused(404, "/v1/embeddings", model="sql", input="a")
        assert error["code"] == "model_not_found"
        models = (await client.get("/v1/models")).json["data"]
        assert [each["id"] for each in models] == MODEL.names


async def test_models_are_listed_with_their_parent(tmp_path: Path, tokenizer: FakeTokenizer):
    async with knowing(tmp_path, tokenizer, SQL, LAW) as client:
        models = (await client.get("/v1/models")).json["data"]
        assert [(each["id"], each.get("parent"), each.get("root")) for each in models] == [
            ("fish", None, None),
            ("org/fish", None, None),
            ("law", "fish", "law"),
            ("sql", "fish", "sql-v1"),
        ]
        assert (await client.get("/v1/models/sql")).json["root"] == "sql-v1"
        assert 'shoal_adapters{state="served"} 2.0' in (await client.get("/metrics")).text


# --- loading and unloading ------------------------------------------------------------------------

ALLOWED = {"allow_runtime_lora_updating": True}


async def order(client: Client, path: str, orders: list[Any], **body: Any) -> tuple[Asked, Any]:
    """An order that the tokenizer has received."""
    num = len(orders)
    asked = asyncio.create_task(client.post(path, lora_name="sql", **body))
    await until(lambda: len(orders) > num)
    assert isinstance(orders[-1], LoadAdapter if path == LOAD else UnloadAdapter)
    assert orders[-1].name == "sql"
    return asked, orders[-1]


async def test_an_adapter_is_loaded_and_unloaded(tmp_path: Path, tokenizer: FakeTokenizer):
    orders = orders_of(tokenizer)
    async with knowing(tmp_path, tokenizer, **ALLOWED) as client:
        body = {"lora_path": "teams/sql-v1", "is_3d_lora_weight": False}
        asked, load = await order(client, LOAD, orders, **body)
        assert load.path == "teams/sql-v1"
        assert not asked.done()
        send(tokenizer, replace(SQL, load=load.load))
        added = "Success: LoRA adapter 'sql' added successfully."
        assert ((await asked).status, (await asked).text) == (200, added)
        asked, unload = await order(client, UNLOAD, orders, lora_int_id=1)
        assert len(unload.unload) == 32
        send(tokenizer, replace(SQL, load=load.load, is_retired=True))
        assert (await asked).text == "Success: LoRA adapter 'sql' removed successfully."
        await client.refused(404, UNLOAD, lora_name="sql")


async def test_a_worker_that_refuses_has_the_reason_told(tmp_path: Path, tokenizer: FakeTokenizer):
    orders = orders_of(tokenizer)
    async with knowing(tmp_path, tokenizer, SQL, **ALLOWED) as client:
        asked, load = await order(client, LOAD, orders, load_inplace=True)
        assert load.path == "sql"
        send(tokenizer, SQL, Adapter(name="sql", load=load.load, problem="r is 300"))
        answer = await asked
        assert (answer.status, answer.error["code"]) == (400, "invalid_value")
        assert answer.error["message"] == "r is 300"


async def test_an_adapter_in_place_is_added_once_the_newer_one_is_served(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    orders, both = orders_of(tokenizer), replace(SQL, num_workers=2)
    async with knowing(tmp_path, tokenizer, both, **ALLOWED) as client:
        asked, load = await order(client, LOAD, orders, load_inplace=True)
        newer = replace(NEWER, load=load.load)
        send(tokenizer, both, newer)
        await asyncio.sleep(0.1)
        assert not asked.done()
        send(tokenizer, both, replace(newer, num_workers=2))
        assert (await asked).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": "a\nb"}, "lora_name"),
        ({"lora_name": "x" * 257}, "lora_name"),
        ({"lora_name": "fish"}, "lora_name"),
        ({"lora_name": "sql"}, "load_inplace"),
        ({"lora_name": "../law"}, "lora_path"),
        ({"lora_name": "law", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "law", "lora_path": "a/../../b"}, "lora_path"),
        ({"lora_name": "law", "lora_path": "a\x00b"}, "lora_path"),
        ({"lora_name": "law", "lora_path": ""}, "lora_path"),
        ({"lora_name": "law", "lora_path": ["law"]}, "lora_path"),
        ({"lora_name": "law", "load_inplace": "yes"}, "load_inplace"),
    ],
)
async def test_a_bad_order_is_400_and_goes_nowhere(
    tmp_path: Path, tokenizer: FakeTokenizer, body: Any, param: str
):
    orders = orders_of(tokenizer)
    async with knowing(tmp_path, tokenizer, SQL, **ALLOWED) as client:
        assert (await client.refused(400, LOAD, **body))["param"] == param
        assert not orders


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_without_the_setting_both_are_403(client: Client, path: str):
    error = await client.refused(403, path, lora_name="law")
    assert error["code"] == "forbidden"
    assert "allow-runtime-lora-updating" in error["message"]


BOTH: Any = ALLOWED | {"api_key": ["a-key"], "admin_token": "a-token"}


@pytest.mark.parametrize(
    ("settings", "shown", "status"),
    [
        (ALLOWED | {"api_key": ["a-key"]}, "a-key", 403),
        (BOTH, "a-key", 401),
        (BOTH, "", 401),
        (BOTH, "a-token", 404),
        (ALLOWED | {"admin_token": "a-token"}, "", 401),
        (ALLOWED | {"admin_token": "a-token"}, "a-token", 404),
    ],
)
async def test_only_the_admin_token_changes_adapters_for_all(
    client: Client, shown: str, status: int
):
    await client.refused(status, UNLOAD, key=shown, lora_name="none")
    await client.refused(400 if status == 404 else status, LOAD, key=shown, lora_name="")


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_without_a_worker_an_order_is_503(tmp_path: Path, path: str):
    async with running_gateway(tmp_path, **ALLOWED) as gateway, client_of(gateway) as client:
        await client.refused(503, path, lora_name="law")


@with_settings(**ALLOWED)
async def test_an_order_without_an_answer_is_504_and_only_one_is_open_for_a_name(client: Client):
    api = api_of(client.gateway)
    asked = asyncio.create_task(client.post(LOAD, lora_name="law"))
    await until(lambda: api._changing)
    await client.refused(400, LOAD, lora_name="law")
    api.timeout_s = 0.05
    assert (await client.refused(504, LOAD, lora_name="sql"))["code"] == "timeout"
    asked.cancel()
    await until(lambda: not api._changing)
