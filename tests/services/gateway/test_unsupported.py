"""Known parameters without support: neutral values pass, all others are refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from services.gateway.chat.requests import unsupported
from services.gateway.chat.requests.parse import parse_chat, parse_completion
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest
from tests.services.gateway.fakes import LIMITS, MODEL

CHAT: Any = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: Any = {"prompt": "a"}


def chat(**fields: Any) -> Job:
    return parse_chat(json.dumps(CHAT | fields).encode(), MODEL, LIMITS)


def completion(**fields: Any) -> Job:
    return parse_completion(json.dumps(TEXT | fields).encode(), MODEL, LIMITS)


@pytest.mark.parametrize("name", unsupported.CHAT)
def test_neutral_values_pass_in_a_chat(name: str) -> None:
    for value in (None, *unsupported.CHAT[name]):
        assert chat(**{name: value}).prompts[0].kind == "chat"


@pytest.mark.parametrize("name", unsupported.COMPLETION)
def test_neutral_values_pass_in_a_completion(name: str) -> None:
    for value in (None, *unsupported.COMPLETION[name]):
        assert completion(**{name: value}).prompts[0].kind == "text"


@pytest.mark.parametrize("name", unsupported.CHAT)
def test_other_values_are_refused_in_a_chat_and_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match="some value") as error:
        chat(**{name: "some value"})
    assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", unsupported.COMPLETION)
def test_other_values_are_refused_in_a_completion_and_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match="some value") as error:
        completion(**{name: "some value"})
    assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_regex", ["a"]),
        ("modalities", ["audio"]),
        ("best_of", 2),
        ("best_of", True),
        ("length_penalty", 0.9),
    ],
)
def test_unsupported_fields_with_an_effect_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat(**{name: value})
    assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), [("best_of", 1.0), ("length_penalty", 1.0)])
def test_a_neutral_number_may_be_written_as_a_float(name: str, value: float) -> None:
    assert chat(**{name: value}).prompts[0].kind == "chat"


def test_an_unknown_field_is_ignored_with_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    chat(color="blue\n", **{"a\nb": 1})
    assert len(caplog.records) == 1
    assert "color" in caplog.text
    assert "a\\nb" in caplog.text


@pytest.mark.parametrize("ask", [chat, completion])
def test_a_field_without_effect_is_named_to_the_client_and_not_logged(
    ask: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name, neutral in unsupported.WITHOUT_EFFECT.items():
        assert ask(**{name: "some value"}).warnings == (f"{name}: it changes nothing here",)
        for value in (None, *neutral):
            assert ask(**{name: value}).warnings == ()
    assert len(ask(user="ada", store=True, metadata={"a": "b" * 100_000}).warnings) == 3
    assert not caplog.records
