"""Lines as text and as JSON, and the lines of requests among them."""

import json
import logging
from datetime import datetime
from typing import Any

import pytest

from shared.process.log import MAX_KNOWN, LogOnce, fields, log_end, set_up
from shared.settings.gateway import GatewayConfig
from tests.conftest import Lines

log = logging.getLogger("somewhere")


def begin(log_format: str = "text", log_requests: bool = True, **settings: Any) -> None:
    config = GatewayConfig(
        log_format=log_format, log_requests=log_requests, instance="0.1", **settings
    )
    set_up("gateway", config)


def test_a_text_line_ends_with_its_fields(log_lines: Lines) -> None:
    begin()
    log.warning("%d fish", 3, extra=fields(status=200, model="org/fish", total_s=0.12345678))
    (line,) = log_lines()
    time, rest = line.split(" ", 1)
    datetime.strptime(time, "%Y-%m-%dT%H:%M:%SZ")
    assert rest == "WARNING gateway 0.1 3 fish status=200 model=org/fish total_s=0.123457"


def test_a_json_line_is_an_object_with_its_fields_as_keys(log_lines: Lines) -> None:
    begin("json")
    log.warning("%d fish", 3, extra=fields(status=200, model="Der Fisch ißt", total_s=0.12345678))
    (line,) = log_lines()
    logged = json.loads(line)
    datetime.strptime(logged.pop("time"), "%Y-%m-%dT%H:%M:%S.%fZ")
    assert logged == {
        "level": "warning",
        "service": "gateway",
        "instance": "0.1",
        "logger": "somewhere",
        "message": "3 fish",
        "status": 200,
        "model": "Der Fisch ißt",
        "total_s": 0.123457,
    }


def test_a_value_that_is_none_is_left_out(log_lines: Lines) -> None:
    begin("json")
    log.info("hm", extra=fields(code=None, num_replays=0))
    logged = json.loads(log_lines()[0])
    assert "code" not in logged
    assert logged["num_replays"] == 0


def test_an_error_in_text_has_its_fields_before_its_traceback(log_lines: Lines) -> None:
    begin()
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.exception("broke", extra=fields(request="a"))
    first, second, *_ = log_lines()
    assert first.endswith(" broke request=a")
    assert second.startswith("Traceback")


def test_an_error_in_json_is_one_line_with_its_traceback(log_lines: Lines) -> None:
    begin("json")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.exception("broke\ndown")
    (line,) = log_lines()
    logged = json.loads(line)
    assert logged["message"] == "broke\ndown"
    assert logged["exception"].startswith("Traceback")
    assert logged["exception"].endswith("ZeroDivisionError")


EVIL = "x status=200\n2026-01-01T00:00:00Z INFO    gateway 0.1 \x1b[31mall is well"


def test_a_clients_words_cannot_be_taken_for_a_field_or_a_line_of_a_text(log_lines: Lines) -> None:
    begin()
    log.info("refused", extra=fields(code=EVIL, tail="y" * 1000, status=400))
    (line,) = log_lines()
    assert " status=200" not in line.replace(repr(EVIL), "")
    assert "code='x status=200\\n2026-01" in line
    assert "\x1b" not in line
    assert len(line) < 300
    assert line.endswith(" status=400")


@pytest.mark.parametrize("text", [EVIL, "\udcff\ud800", "\u2028\x00"])
def test_whatever_a_client_writes_a_json_line_is_one_object(log_lines: Lines, text: str) -> None:
    begin("json")
    log.info(text, extra=fields(code=text))
    (line,) = log_lines()
    logged = json.loads(line)
    assert logged["message"] == logged["code"] == text.encode(errors="backslashreplace").decode()


def test_a_value_that_json_does_not_know_is_logged_as_text(log_lines: Lines) -> None:
    begin("json")
    log.info("hm", extra=fields(what=1 + 2j))
    assert json.loads(log_lines()[0])["what"] == "(1+2j)"


def test_a_request_is_logged_by_its_clients_id_and_its_name_in_the_mesh(log_lines: Lines) -> None:
    begin("json")
    log_end("sequence ended", "my/id~0a1b/0/2", attempt=1)
    log_end("request ended", "my/id", status=200)
    sequence, request = map(json.loads, log_lines())
    assert (sequence["request"], sequence["name"]) == ("my/id", "my/id~0a1b/0/2")
    assert sequence["logger"] == "shoal.requests"
    assert request["request"] == "my/id"
    assert "name" not in request


def test_an_id_of_any_length_is_whole_in_a_text(log_lines: Lines) -> None:
    begin()
    log_end("request ended", "i" * 128 + "~0a1b2c3d/127/127")
    assert f" request={'i' * 128} name={'i' * 128}~0a1b2c3d/127/127" in log_lines()[0]


@pytest.mark.parametrize("settings", [{"log_requests": False}, {"log_level": "warning"}])
def test_lines_of_requests_can_be_switched_off(log_lines: Lines, settings: dict[str, Any]) -> None:
    begin(**settings)
    log_end("request ended", "a", status=200)
    log.warning("something else")
    assert [line.split()[-1] for line in log_lines()] == ["else"]
    begin()
    log_end("request ended", "a", status=200)
    assert log_lines()[0].endswith("request ended request=a status=200")


def test_a_logged_text_is_known_until_very_many_others_were_logged() -> None:
    once = LogOnce()
    assert once.is_new("a")
    assert not once.is_new("a")
    assert all(once.is_new(str(number)) for number in range(MAX_KNOWN))
    assert once.is_new("a")
