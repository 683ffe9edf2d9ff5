"""Models, health, readiness and version."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from openai import AsyncOpenAI, NotFoundError

from services.gateway import service
from services.gateway.service import GatewayService
from shared.errors import ConfigError
from shared.wire.messages import State
from tests.services.gateway.client import TEXT, Client, client_of
from tests.services.gateway.fakes import MODEL, FakeTokenizer, running_gateway, until


async def test_models_have_all_their_names(openai: AsyncOpenAI, client: Client) -> None:
    models = [model async for model in openai.models.list()]
    assert [model.id for model in models] == MODEL.names
    assert {model.created for model in models} == {MODEL.created}
    assert (await openai.models.retrieve("org/fish")).id == "org/fish"
    model = (await client.get("/v1/models/org/fish")).json
    assert (model["object"], model["max_model_len"]) == ("model", MODEL.max_model_len)
    with pytest.raises(NotFoundError, match="org/fish"):
        await openai.models.retrieve("org/cat")


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version"])
async def test_a_ready_gateway_reports_ready(client: Client, path: str) -> None:
    answer = await client.get(path)
    assert answer.status == 200
    assert answer.json


async def test_a_gateway_says_the_version_that_the_command_says(client: Client) -> None:
    command = [sys.executable, "-c", "from cli.main import main; main()", "--version"]
    asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await asked.communicate()
    version = (await client.get("/version")).json["version"]
    assert said.decode() == f"shoal {version}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)


async def test_without_a_tokenizer_health_is_503_with_the_reason_and_ping_is_200(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path) as gateway, client_of(gateway) as client:
        for path in ("/health", "/ready"):
            answer = await client.get(path)
            assert (answer.status, answer.json["reason"]) == (503, "no tokenizer is connected")
        assert (await client.get("/ping")).status == 200


async def test_a_gateway_is_ready_when_its_tokenizer_is(
    gateway: GatewayService, tokenizer: FakeTokenizer
) -> None:
    tokenizer.state = State.NOT_READY
    tokenizer.link.send_status()
    await until(lambda: gateway.status().state == State.NOT_READY)
    assert "the water is cold" in gateway.status().reason
    tokenizer.state = State.READY
    tokenizer.link.send_status()
    await until(lambda: gateway.status().state == State.READY)


async def test_a_draining_gateway_reports_it_and_still_accepts_for_a_while(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LAME_DUCK_S", 3600)
    draining = asyncio.create_task(client.gateway.drain())
    await until(lambda: client.gateway.status().state == State.DRAINING)
    assert (await client.get("/ready")).status == 503
    assert (await client.get("/health")).status == 200
    await client.answered(TEXT, "x", prompt="a")
    draining.cancel()


async def test_a_drained_gateway_has_closed_its_port_and_ended_its_requests(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LAME_DUCK_S", 0)
    port = client.gateway.port
    asked, request = await client.begun()
    draining = asyncio.create_task(client.gateway.drain())
    await until(lambda: not client.gateway.port)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    assert not draining.done()
    request.accept()
    await client.finish(asked, request)
    await draining


async def test_a_port_in_use_is_a_setting_that_is_wrong(
    tmp_path: Path, gateway: GatewayService
) -> None:
    with pytest.raises(ConfigError, match=str(gateway.port)):
        async with running_gateway(tmp_path, port=gateway.port):
            pass
