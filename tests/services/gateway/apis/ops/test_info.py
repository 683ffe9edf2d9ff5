"""Models, health, readiness and version."""

import asyncio
import re
import sys
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI, NotFoundError

from services.gateway import service
from services.gateway.service import GatewayService
from shared.errors import ConfigError
from shared.wire.messages import State
from tests.services.gateway.fakes import MODEL, FakeTokenizer, running_gateway, until


async def test_models_are_listed_with_all_their_names(openai: AsyncOpenAI) -> None:
    models = [model async for model in openai.models.list()]
    assert [model.id for model in models] == MODEL.names
    assert {model.created for model in models} == {MODEL.created}


async def test_a_model_is_found_by_a_name_with_a_slash(
    openai: AsyncOpenAI, http: aiohttp.ClientSession
) -> None:
    assert (await openai.models.retrieve("org/fish")).id == "org/fish"
    async with http.get("/v1/models/org/fish") as response:
        model = await response.json()
    assert (model["object"], model["max_model_len"]) == ("model", MODEL.max_model_len)


async def test_an_unknown_model_is_404(openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="org/fish"):
        await openai.models.retrieve("org/cat")


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version"])
async def test_a_ready_gateway_reports_ready(http: aiohttp.ClientSession, path: str) -> None:
    async with http.get(path) as response:
        assert response.status == 200
        assert await response.json()


async def test_a_gateway_says_the_version_that_the_command_says(
    http: aiohttp.ClientSession,
) -> None:
    command = [sys.executable, "-c", "from cli.main import main; main()", "--version"]
    asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await asked.communicate()
    async with http.get("/version") as response:
        version = (await response.json())["version"]
    assert said.decode() == f"shoal {version}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)


async def test_without_a_tokenizer_health_is_503_with_the_reason_and_ping_is_200(
    tmp_path: Path,
) -> None:
    async with (
        running_gateway(tmp_path) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        for path in ("/health", "/ready"):
            async with http.get(path) as response:
                assert response.status == 503
                assert (await response.json())["reason"] == "no tokenizer is connected"
        async with http.get("/ping") as response:
            assert response.status == 200


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
    gateway: GatewayService,
    tokenizer: FakeTokenizer,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "LAME_DUCK_S", 3600)
    draining = asyncio.create_task(gateway.drain())
    await until(lambda: gateway.status().state == State.DRAINING)
    async with http.get("/ready") as ready, http.get("/health") as health:
        assert (ready.status, health.status) == (503, 200)
    response, _ = await asyncio.gather(
        http.post("/v1/completions", json={"prompt": "a"}), tokenizer.answer("x")
    )
    async with response:
        assert response.status == 200
    draining.cancel()


async def test_a_drained_gateway_has_closed_its_port_and_ended_its_requests(
    gateway: GatewayService,
    tokenizer: FakeTokenizer,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "LAME_DUCK_S", 0)
    port = gateway.port
    posting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}).__aenter__())
    request = await tokenizer.submitted.get()
    draining = asyncio.create_task(gateway.drain())
    await until(lambda: not gateway.port)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    assert not draining.done()
    request.accept()
    request.finish()
    async with await posting as response:
        assert response.status == 200
    await draining


async def test_a_port_in_use_is_a_setting_that_is_wrong(
    tmp_path: Path, gateway: GatewayService
) -> None:
    with pytest.raises(ConfigError, match=str(gateway.port)):
        async with running_gateway(tmp_path, port=gateway.port):
            pass
