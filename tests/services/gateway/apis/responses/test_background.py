"""Responses in the background: queued, polled, cancelled, lost with their gateway."""

import asyncio
import gc
import json
import sqlite3
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from services.gateway.apis.responses import background
from services.gateway.service import GatewayService
from tests.services.gateway.fakes import FakeTokenizer, until
from tests.services.gateway.openai_client import client_at, client_of, clients, gateway_of
from tests.services.gateway.process import gateway_process

ASKED: dict[str, Any] = {"model": "fish", "input": "Hi", "background": True}
KEYS = ["key-of-ann", "key-of-bob"]


def store_in(tmp_path: Path) -> dict[str, Any]:
    return {"response_store": tmp_path / "store.db", "batch_dir": None}


def storing(tmp_path: Path, **settings: Any) -> AbstractAsyncContextManager[GatewayService]:
    return gateway_of(tmp_path, **store_in(tmp_path) | settings)


def store_clients(tmp_path: Path, *keys: str, **settings: Any) -> AbstractAsyncContextManager[Any]:
    return clients(tmp_path, *keys, **store_in(tmp_path) | settings)


async def until_status(client: AsyncOpenAI, response_id: str, status: str) -> Any:
    async with asyncio.timeout(20):
        while (found := await client.responses.retrieve(response_id)).status != status:
            await asyncio.sleep(0.02)
    return found


async def test_one_is_queued_made_and_kept(tmp_path: Path, tokenizer: FakeTokenizer):
    async with store_clients(tmp_path) as client:
        created = await client.responses.create(**ASKED, metadata={"a": "b"})
        assert (created.status, created.background, created.output) == ("queued", True, [])
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            await client.responses.create(**ASKED, previous_response_id=created.id)
        submitted = await tokenizer.submitted.get()
        await asyncio.sleep(1.1)  # times are in whole seconds
        submitted.accept()
        await until_status(client, created.id, "in_progress")
        submitted.text("Hello", "!")
        submitted.finish()
        found = await until_status(client, created.id, "completed")
        assert (found.id, found.output_text, found.background) == (created.id, "Hello!", True)
        assert (found.created_at, found.metadata) == (created.created_at, {"a": "b"})
        items = await client.responses.input_items.list(created.id)
        assert [item.to_dict()["role"] async for item in items] == ["user"]
        with pytest.raises(openai.BadRequestError, match="has ended"):
            await client.responses.cancel(created.id)


async def test_fields_without_effect_are_named_in_the_queued_response(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with store_clients(tmp_path) as client:
        for tier, expected in (("flex", "service_tier: it changes nothing here"), ("auto", None)):
            asked = ASKED | {"service_tier": tier}
            reply = await client.responses.with_raw_response.create(**asked)
            assert reply.headers.get("X-Shoal-Warnings") == expected
            await tokenizer.answer("x")
            await until_status(client, reply.parse().id, "completed")


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("is_accepted", [True, False])
async def test_one_is_cancelled_through_any_gateway(
    tmp_path: Path, tokenizer: FakeTokenizer, is_here: bool, is_accepted: bool
):
    async with (
        storing(tmp_path) as first,
        storing(tmp_path, instance="g2") as second,
        client_of(first) as client,
        client_of(first if is_here else second) as other,
    ):
        created = await client.responses.create(**ASKED)
        submitted = await tokenizer.submitted.get()
        if is_accepted:
            submitted.accept()
        await until_status(other, created.id, "in_progress" if is_accepted else "queued")
        found = await other.responses.cancel(created.id)
        assert (found.id, found.status) == (created.id, "cancelled")
        await tokenizer.cancelled.get()
        assert (await client.responses.retrieve(created.id)).to_dict() == found.to_dict()
        await until(lambda: first.status().load == 0)


async def test_one_belongs_to_its_key_and_counts_in_its_limits(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with store_clients(tmp_path, *KEYS, max_open_requests_per_key=1) as (ann, bob):
        created = await ann.responses.create(**ASKED)
        submitted = await tokenizer.accepted()
        with pytest.raises(openai.RateLimitError, match="max-open-requests-per-key"):
            await ann.responses.create(**ASKED)
        for asked in (bob.responses.retrieve(created.id), bob.responses.cancel(created.id)):
            with pytest.raises(openai.NotFoundError):
                await asked
        submitted.finish()
        await until_status(ann, created.id, "completed")


async def test_a_deleted_response_is_cancelled(tmp_path: Path, tokenizer: FakeTokenizer):
    async with storing(tmp_path) as gateway, client_of(gateway) as client:
        created = await client.responses.create(**ASKED)
        await tokenizer.accepted()
        await client.responses.delete(created.id)
        await tokenizer.cancelled.get()
        await until(lambda: gateway.status().load == 0)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(created.id)


async def test_one_that_fails_says_why(tmp_path: Path, tokenizer: FakeTokenizer):
    async with store_clients(tmp_path) as client:
        created = await client.responses.create(**ASKED)
        (await tokenizer.accepted()).fail(400, "grammar_too_complex", "it grew")
        found = await until_status(client, created.id, "failed")
        assert (found.error.code, found.error.message) == ("grammar_too_complex", "it grew")


@pytest.mark.slow
async def test_one_whose_gateway_is_killed_has_failed(tmp_path: Path, tokenizer: FakeTokenizer):
    flags = ["--response-store", str(tmp_path / "store.db"), "--instance", "g2"]
    async with store_clients(tmp_path) as client:
        async with gateway_process(tmp_path, *flags) as killed, client_at(killed.url) as other:
            created = await other.responses.create(**ASKED)
            await tokenizer.accepted()
            await until_status(client, created.id, "in_progress")
        found = await until_status(client, created.id, "failed")
        assert found.error.code == "gateway_lost"
        assert not [*tmp_path.glob("store.db.*.lock")][1:], "only our own lock is left"


async def test_a_start_ends_the_responses_of_killed_gateways(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    """Anyone can then displace it from the store."""
    path = tmp_path / "store.db"
    flags = ["--response-store", str(path), "--instance", "g2"]
    async with gateway_process(tmp_path, *flags) as killed, client_at(killed.url) as other:
        await other.responses.create(**ASKED)
        await tokenizer.accepted()
    async with storing(tmp_path):
        database = sqlite3.connect(path)
        assert database.execute("SELECT * FROM background").fetchall() == []
        [[response]] = database.execute("SELECT response FROM responses").fetchall()
        database.close()
    assert json.loads(response)["error"]["code"] == "gateway_lost"


async def test_a_draining_gateway_finishes_its_responses(tmp_path: Path, tokenizer: FakeTokenizer):
    async with (
        storing(tmp_path) as gateway,
        storing(tmp_path, instance="g2") as other,
        client_of(gateway) as client,
        client_of(other) as reader,
    ):
        created = await client.responses.create(**ASKED)
        submitted = await tokenizer.accepted()
        await until_status(reader, created.id, "in_progress")
        draining = asyncio.create_task(gateway.drain())
        await asyncio.wait([draining], timeout=0.1)
        submitted.text("Hello")
        submitted.finish()
        await draining
        assert (await until_status(reader, created.id, "completed")).output_text == "Hello"


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"store": False}, "store is false"), ({"stream": True}, "stream is true")],
)
async def test_features_missing_in_the_background_are_refused(
    tmp_path: Path, tokenizer: FakeTokenizer, fields: dict[str, Any], words: str
):
    async with store_clients(tmp_path) as client:
        with pytest.raises(openai.BadRequestError, match=words):
            await client.responses.create(**ASKED | fields)


async def test_without_a_store_there_is_no_background(openai: AsyncOpenAI):
    with pytest.raises(Exception, match="there is no response-store"):
        await openai.responses.create(**ASKED)


async def test_a_key_leaves_places_to_the_others(tmp_path: Path, tokenizer: FakeTokenizer):
    async with store_clients(tmp_path, *KEYS, max_background_responses=4) as (ann, bob):
        for _ in range(4):
            await ann.responses.create(**ASKED)
        with pytest.raises(openai.RateLimitError, match="max-background-responses = 4"):
            await ann.responses.create(**ASKED)
        for _ in range(2):
            await bob.responses.create(**ASKED)
        with pytest.raises(openai.RateLimitError, match="2 responses are made in the background"):
            await bob.responses.create(**ASKED)


async def test_bodies_of_one_key_leave_room_to_the_others(tmp_path: Path, tokenizer: FakeTokenizer):
    async with store_clients(tmp_path, *KEYS, max_body_bytes=2000) as (ann, bob):
        large = ASKED | {"input": "x" * 1500}
        await ann.responses.create(**large)
        with pytest.raises(openai.RateLimitError, match="max-body-bytes = 2000"):
            await ann.responses.create(**large)
        await bob.responses.create(**large)


@pytest.mark.parametrize("place", ["_error", "_note_begin"])
async def test_an_error_of_ours_fails_one_response_and_ends_nothing(
    tmp_path: Path,
    tokenizer: FakeTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
):
    unretrieved: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, found: unretrieved.append(found))

    async def broken(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    async with store_clients(tmp_path) as client:
        with monkeypatch.context() as patch:
            patch.setattr(background.Background, place, broken)
            created = await client.responses.create(**ASKED)
            if place == "_error":
                found = await until_status(client, created.id, "failed")
                assert found.error.code == "server_error"
            await until(lambda: "a fault of ours" in caplog.text)
        other = await client.responses.create(**ASKED)
        await client.responses.cancel(other.id)
        await until_status(client, other.id, "cancelled")
    gc.collect()
    assert not unretrieved


async def test_there_are_no_more_than_the_limit(tmp_path: Path, tokenizer: FakeTokenizer):
    async with store_clients(tmp_path, max_background_responses=1) as client:
        first = await client.responses.create(**ASKED)
        with pytest.raises(openai.RateLimitError, match="max-background-responses = 1"):
            await client.responses.create(**ASKED)
        submitted = await tokenizer.accepted()
        submitted.finish()
        await until_status(client, first.id, "completed")
