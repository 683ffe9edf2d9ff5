"""Adapters as names of models, and their loading and unloading."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from services.gateway.apis.adapters.endpoint import LOAD, UNLOAD, AdapterApi
from services.gateway.service import GatewayService
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.envelope import read_options
from shared.wire.messages import (
    Adapter,
    Adapters,
    LoadAdapter,
    Message,
    PoolingInfo,
    State,
    UnloadAdapter,
)
from tests.services.gateway.fakes import (
    MODEL,
    FakeTokenizer,
    fake_tokenizer,
    running_gateway,
    until,
)

SQL = Adapter(name="sql", digest="1" * 32, loaded_s=1.0, path="teams/sql-v1", load="l0")
LAW = Adapter(name="law", digest="2" * 32, loaded_s=1.0)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: Any = [{"role": "user", "content": "Hi"}]


def orders_of(tokenizer: FakeTokenizer) -> list[Message]:
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
async def serving(
    folder: Path, tokenizer: FakeTokenizer, *adapters: Adapter, **settings: Any
) -> AsyncIterator[tuple[GatewayService, aiohttp.ClientSession]]:
    """A gateway that knows ``adapters``."""
    async with running_gateway(folder, **settings) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        send(tokenizer, *adapters)
        await known(gateway, *adapters)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            yield gateway, http


async def error_of(response: aiohttp.ClientResponse) -> tuple[int, str, str]:
    error = (await response.json())["error"]
    return response.status, error["code"], error["message"]


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
    async with serving(tmp_path, tokenizer, SQL, LAW) as (_, http):
        asking = asyncio.create_task(http.post(CHAT, json={"messages": HI} | fields))
        asked = await tokenizer.answer("Hello")
        assert read_options(asked.submit.options).adapter == SQL.digest
        reply = await (await asking).json()
        assert reply["model"] == shown
        assert reply["usage"]["prompt_tokens"]


async def test_the_model_itself_has_no_adapter(tmp_path: Path, tokenizer: FakeTokenizer):
    async with serving(tmp_path, tokenizer, SQL) as (_, http):
        for fields in ({}, {"model": "org/fish"}, {"model": "fish", "lora_path": None}):
            asking = asyncio.create_task(http.post(CHAT, json={"messages": HI} | fields))
            asked = await tokenizer.answer("Hello")
            assert read_options(asked.submit.options).adapter == ""
            await asking


@pytest.mark.parametrize("name", ["law", "sql:fish", "fish:law", "sql:sql", "fish:org/fish"])
async def test_another_name_is_404_with_the_names_that_exist(
    tmp_path: Path, tokenizer: FakeTokenizer, name: str
):
    async with serving(tmp_path, tokenizer, SQL) as (_, http):
        response = await http.post(CHAT, json={"messages": HI, "model": name})
        status, code, text = await error_of(response)
        assert (status, code) == (404, "model_not_found")
        assert "fish, org/fish, sql" in text


async def test_a_request_goes_to_a_tokenizer_that_knows_its_adapter(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with (
        fake_tokenizer(tmp_path, "t2") as other,
        serving(tmp_path, tokenizer, SQL) as (gateway, http),
    ):
        await until(lambda: len(gateway._mesh.tokenizers) == 2)
        send(other, LAW)
        await known(gateway, SQL, LAW)
        for name, expected in (("sql", tokenizer), ("law", other)) * 3:
            body = {"prompt": "a", "model": name}
            asking = asyncio.create_task(http.post(TEXT, json=body))
            await expected.answer("Hello")
            assert (await asking).status == 200


async def test_a_replay_keeps_the_adapter_that_the_name_stood_for(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    newer = replace(SQL, digest="3" * 32, loaded_s=2.0)
    async with serving(tmp_path, tokenizer, SQL) as (gateway, http):
        async with fake_tokenizer(tmp_path, "t2") as other:
            await until(lambda: len(gateway._mesh.tokenizers) == 2)
            send(tokenizer, LAW)
            await known(gateway, LAW)
            send(other, SQL)
            await known(gateway, LAW, SQL)
            asking = asyncio.create_task(http.post(TEXT, json={"prompt": "a", "model": "sql"}))
            (await other.accepted()).text("He")
        await until(lambda: len(gateway._mesh.tokenizers) == 1)
        await asyncio.sleep(0.2)
        assert tokenizer.submitted.empty(), "it waits for a tokenizer that knows the adapter"
        send(tokenizer, newer, replace(SQL, is_retired=True))
        again = await tokenizer.accepted()
        assert read_options(again.submit.options).adapter == SQL.digest
        again.num_sent[0] = 1
        again.text("llo")
        again.finish()
        assert (await (await asking).json())["choices"][0]["text"] == "Hello"


async def test_a_replay_whose_adapter_is_nowhere_fails_in_the_end(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with serving(tmp_path, tokenizer, LAW, replay_s=0.3) as (gateway, http):
        async with fake_tokenizer(tmp_path, "t2") as other:
            await until(lambda: len(gateway._mesh.tokenizers) == 2)
            send(other, SQL)
            await known(gateway, LAW, SQL)
            asking = asyncio.create_task(http.post(CHAT, json={"messages": HI, "model": "sql"}))
            await other.accepted()
        assert (await error_of(await asking))[:2] == (503, "adapter_lost")


async def test_models_that_pool_have_no_adapters(tmp_path: Path):
    model = replace(MODEL, runner="pooling", pooling=PoolingInfo("embed", "last", "none", 4))
    async with (
        fake_tokenizer(tmp_path, model=model) as tokenizer,
        serving(tmp_path, tokenizer, SQL) as (_, http),
    ):
        response = await http.post("/v1/embeddings", json={"model": "sql", "input": "a"})
        assert (await error_of(response))[:2] == (404, "model_not_found")
        names = [each["id"] for each in (await (await http.get("/v1/models")).json())["data"]]
        assert names == MODEL.names


async def test_models_are_listed_with_their_parent(tmp_path: Path, tokenizer: FakeTokenizer):
    async with serving(tmp_path, tokenizer, SQL, LAW) as (_, http):
        models = (await (await http.get("/v1/models")).json())["data"]
        assert [each["id"] for each in models] == ["fish", "org/fish", "law", "sql"]
        assert [each.get("parent") for each in models] == [None, None, "fish", "fish"]
        assert [each.get("root") for each in models] == [None, None, "law", "sql-v1"]
        assert (await (await http.get("/v1/models/sql")).json())["root"] == "sql-v1"
        metrics = await (await http.get("/metrics")).text()
        assert 'shoal_adapters{state="served"} 2.0' in metrics


# --- loading and unloading ------------------------------------------------------------------------

ALLOWED = {"allow_runtime_lora_updating": True}


async def test_an_adapter_is_loaded_and_unloaded(tmp_path: Path, tokenizer: FakeTokenizer):
    orders = orders_of(tokenizer)
    async with serving(tmp_path, tokenizer, **ALLOWED) as (_, http):
        body = {"lora_name": "sql", "lora_path": "teams/sql-v1", "is_3d_lora_weight": False}
        asking = asyncio.create_task(http.post(LOAD, json=body))
        await until(lambda: orders)
        (order,) = orders
        assert isinstance(order, LoadAdapter)
        assert (order.name, order.path) == ("sql", "teams/sql-v1")
        assert not asking.done()
        send(tokenizer, replace(SQL, load=order.load))
        response = await asking
        assert response.status == 200
        assert await response.text() == "Success: LoRA adapter 'sql' added successfully."
        unloading = asyncio.create_task(
            http.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 1})
        )
        await until(lambda: len(orders) == 2)
        unload = orders[1]
        assert isinstance(unload, UnloadAdapter)
        assert (unload.name, len(unload.unload)) == ("sql", 32)
        send(tokenizer, replace(SQL, load=order.load, is_retired=True))
        response = await unloading
        assert await response.text() == "Success: LoRA adapter 'sql' removed successfully."
        missing = await http.post(UNLOAD, json={"lora_name": "sql"})
        assert (await error_of(missing))[0] == 404


async def test_a_worker_that_refuses_has_the_reason_told(tmp_path: Path, tokenizer: FakeTokenizer):
    orders = orders_of(tokenizer)
    async with serving(tmp_path, tokenizer, SQL, **ALLOWED) as (_, http):
        body = {"lora_name": "sql", "load_inplace": True}
        asking = asyncio.create_task(http.post(LOAD, json=body))
        await until(lambda: orders)
        (order,) = orders
        assert isinstance(order, LoadAdapter)
        assert order.path == "sql"
        send(tokenizer, SQL, Adapter(name="sql", load=order.load, problem="r is 300"))
        assert await error_of(await asking) == (400, "invalid_value", "r is 300")


async def test_an_adapter_in_place_is_added_once_the_newer_one_is_served(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    orders = orders_of(tokenizer)
    both = replace(SQL, num_workers=2)
    async with serving(tmp_path, tokenizer, both, **ALLOWED) as (_, http):
        body = {"lora_name": "sql", "load_inplace": True}
        asking = asyncio.create_task(http.post(LOAD, json=body))
        await until(lambda: orders)
        (order,) = orders
        assert isinstance(order, LoadAdapter)
        newer = replace(SQL, digest="3" * 32, load=order.load, loaded_s=2.0)
        send(tokenizer, both, newer)
        await asyncio.sleep(0.1)
        assert not asking.done()
        send(tokenizer, both, replace(newer, num_workers=2))
        assert (await asking).status == 200


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
    async with serving(tmp_path, tokenizer, SQL, **ALLOWED) as (_, http):
        response = await http.post(LOAD, json=body)
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param
        assert not orders


async def test_without_the_setting_both_are_403(tmp_path: Path, tokenizer: FakeTokenizer):
    async with serving(tmp_path, tokenizer, SQL) as (_, http):
        for path in (LOAD, UNLOAD):
            status, code, text = await error_of(await http.post(path, json={"lora_name": "law"}))
            assert (status, code) == (403, "forbidden")
            assert "allow-runtime-lora-updating" in text


@pytest.mark.parametrize(
    ("settings", "shown", "status"),
    [
        ({"api_key": ["a-key"]}, "a-key", 403),
        ({"api_key": ["a-key"], "admin_token": "a-token"}, "a-key", 401),
        ({"api_key": ["a-key"], "admin_token": "a-token"}, "", 401),
        ({"api_key": ["a-key"], "admin_token": "a-token"}, "a-token", 404),
        ({"admin_token": "a-token"}, "", 401),
        ({"admin_token": "a-token"}, "a-token", 404),
    ],
)
async def test_only_the_admin_token_changes_adapters_for_all(
    tmp_path: Path, tokenizer: FakeTokenizer, settings: Any, shown: str, status: int
):
    async with serving(tmp_path, tokenizer, SQL, **ALLOWED, **settings) as (_, http):
        headers = {"Authorization": f"Bearer {shown}"} if shown else {}
        response = await http.post(UNLOAD, json={"lora_name": "none"}, headers=headers)
        assert response.status == status, await response.text()
        load = await http.post(LOAD, json={"lora_name": ""}, headers=headers)
        assert load.status == (400 if status == 404 else status)


async def test_without_a_worker_an_order_is_503(tmp_path: Path):
    async with (
        running_gateway(tmp_path, **ALLOWED) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        for path in (LOAD, UNLOAD):
            assert (await http.post(path, json={"lora_name": "law"})).status == 503


async def test_an_order_without_an_answer_is_504_and_only_one_is_open_for_a_name(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with serving(tmp_path, tokenizer, SQL, **ALLOWED) as (gateway, http):
        api_of(gateway).timeout_s = 0.2
        asking = asyncio.create_task(http.post(LOAD, json={"lora_name": "law"}))
        await until(lambda: api_of(gateway)._changing)
        second = await http.post(LOAD, json={"lora_name": "law"})
        assert (await error_of(second))[0] == 400
        assert (await error_of(await asking))[:2] == (504, "timeout")
        assert not api_of(gateway)._changing
