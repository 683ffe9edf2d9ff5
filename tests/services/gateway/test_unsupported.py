"""Known parameters without support: neutral values pass, all others are refused."""

from typing import Any

import pytest

from services.gateway.chat.requests import unsupported
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest
from tests.services.gateway import asking
from tests.services.gateway.fakes import MODEL

ASK = {"chat": asking.chat, "completion": asking.completion}
FIELDS = [
    (kind, name)
    for kind, names in (("chat", unsupported.CHAT), ("completion", unsupported.COMPLETION))
    for name in names
]


def ask(kind: str, **fields: Any) -> Job:
    return ASK[kind](MODEL, **fields)


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_neutral_values_pass_and_others_are_refused_and_named(kind: str, name: str) -> None:
    neutral = unsupported.CHAT if kind == "chat" else unsupported.COMPLETION
    for value in (None, *neutral[name]):
        expected = "chat" if kind == "chat" else "text"
        assert ask(kind, **{name: value}).prompts[0].kind == expected
    with pytest.raises(InvalidRequest, match="some value") as error:
        ask(kind, **{name: "some value"})
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
        ask("chat", **{name: value})
    assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), [("best_of", 1.0), ("length_penalty", 1.0)])
def test_a_neutral_number_may_be_written_as_a_float(name: str, value: float) -> None:
    assert ask("chat", **{name: value}).prompts[0].kind == "chat"


def test_an_unknown_field_is_ignored_with_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    ask("chat", color="blue\n", **{"a\nb": 1})
    assert len(caplog.records) == 1
    assert "color" in caplog.text
    assert "a\\nb" in caplog.text


@pytest.mark.parametrize("kind", ASK)
def test_a_field_without_effect_is_named_to_the_client_and_not_logged(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name, neutral in unsupported.WITHOUT_EFFECT.items():
        assert ask(kind, **{name: "some value"}).warnings == (f"{name}: it changes nothing here",)
        for value in (None, *neutral):
            assert ask(kind, **{name: value}).warnings == ()
    assert len(ask(kind, user="ada", store=True, metadata={"a": "b" * 100_000}).warnings) == 3
    assert not caplog.records
