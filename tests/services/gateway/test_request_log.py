"""The gateway's log lines of failed requests."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.wire.messages import State
from tests.services.gateway.fakes import FakeTokenizer, running_gateway, until

TEXT = "/v1/completions"

LoggedFields = Callable[[], dict[str, Any]]


@pytest.fixture
def logged_fields(caplog: pytest.LogCaptureFixture) -> LoggedFields:
    """The fields of the one line about a request."""
    caplog.set_level("INFO")

    def logged_fields() -> dict[str, Any]:
        (record,) = [each for each in caplog.records if each.name == "shoal.requests"]
        fields: dict[str, Any] = vars(record)["fields"]
        return fields

    return logged_fields


async def test_a_stream_that_fails_is_logged_with_its_status_and_the_error(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, logged_fields: LoggedFields
) -> None:
    async def fail() -> None:
        request = await tokenizer.accepted()
        request.text("x", "y")
        request.fail(500, "internal_error", "the whale is ill")

    response, _ = await asyncio.gather(
        http.post(TEXT, json={"prompt": "a", "stream": True}), fail()
    )
    async with response:
        assert "the whale is ill" in await response.text()
    line = logged_fields()
    assert (line["status"], line["code"]) == (200, "internal_error")
    assert (line["num_prompt_tokens"], line["num_output_tokens"]) == (5, 2)
    assert line["request"] == response.headers["X-Request-Id"]


async def test_an_id_in_the_body_is_the_one_that_is_logged(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, logged_fields: LoggedFields
) -> None:
    body = {"prompt": "a", "request_id": "seven", "model": "org/fish"}
    response, _ = await asyncio.gather(http.post(TEXT, json=body), tokenizer.answer("x"))
    response.close()
    line = logged_fields()
    assert (line["request"], line["model"], line["status"]) == ("seven", "org/fish", 200)


async def test_a_request_that_the_mesh_refuses_is_logged_with_its_model_and_no_tokens(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, logged_fields: LoggedFields
) -> None:
    async def refuse() -> None:
        (await tokenizer.submitted.get()).fail(429, "full", "too many fish")

    response, _ = await asyncio.gather(http.post(TEXT, json={"prompt": "a"}), refuse())
    response.close()
    line = logged_fields()
    assert (line["status"], line["code"], line["model"]) == (429, "full", "fish")
    assert line["num_prompt_tokens"] == line["num_output_tokens"] == 0
    assert "ttft_s" not in line


async def test_a_wrong_key_is_logged_even_at_a_route_that_machines_poll(
    tmp_path: Path, tokenizer: FakeTokenizer, logged_fields: LoggedFields
) -> None:
    async with (
        running_gateway(tmp_path, api_key=["good"]) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        await until(lambda: gateway.status().state == State.READY)
        for key in ("good", "secret"):
            async with http.get("/metrics", headers={"Authorization": f"Bearer {key}"}):
                pass
    line = logged_fields()
    assert (line["route"], line["status"], line["code"]) == ("/metrics", 401, "invalid_api_key")
    assert "secret" not in str(line)
