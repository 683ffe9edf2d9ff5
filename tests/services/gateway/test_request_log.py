"""The gateway's log lines of failed requests."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.services.gateway.client import TEXT, Client, with_settings

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
    client: Client, logged_fields: LoggedFields
) -> None:
    asked, request = await client.accepted(TEXT, prompt="a", stream=True)
    request.text("x", "y")
    request.fail(500, "internal_error", "the whale is ill")
    answer = await asked
    assert "the whale is ill" in answer.text
    line = logged_fields()
    assert (line["status"], line["code"]) == (200, "internal_error")
    assert (line["num_prompt_tokens"], line["num_output_tokens"]) == (5, 2)
    assert line["request"] == answer.headers["X-Request-Id"]


async def test_an_id_in_the_body_is_the_one_that_is_logged(
    client: Client, logged_fields: LoggedFields
) -> None:
    await client.answered(TEXT, "x", prompt="a", request_id="seven", model="org/fish")
    line = logged_fields()
    assert (line["request"], line["model"], line["status"]) == ("seven", "org/fish", 200)


async def test_a_request_that_the_mesh_refuses_is_logged_with_its_model_and_no_tokens(
    client: Client, logged_fields: LoggedFields
) -> None:
    asked, request = await client.begun()
    request.fail(429, "full", "too many fish")
    await asked
    line = logged_fields()
    assert (line["status"], line["code"], line["model"]) == (429, "full", "fish")
    assert line["num_prompt_tokens"] == line["num_output_tokens"] == 0
    assert "ttft_s" not in line


@with_settings(api_key=["good"])
async def test_a_wrong_key_is_logged_even_at_a_route_that_machines_poll(
    client: Client, logged_fields: LoggedFields
) -> None:
    for key in ("good", "secret"):
        await client.get("/metrics", Authorization=f"Bearer {key}")
    line = logged_fields()
    assert (line["route"], line["status"], line["code"]) == ("/metrics", 401, "invalid_api_key")
    assert "secret" not in str(line)
