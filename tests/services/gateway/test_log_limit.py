"""The log has few lines about any number of bad requests."""

import json
import logging
import time
from types import ModuleType

import pytest

from services.gateway.chat.requests import json_body
from services.gateway.chat.requests.parse import parse_completion
from services.gateway.http import connection, failures, log_limit
from services.gateway.http.log_limit import MAX_LINES, LogLimit
from tests.services.gateway.fakes import LIMITS, MODEL


@pytest.fixture
def limited() -> logging.Logger:
    log = logging.getLogger("a fish")
    log.filters[:] = [LogLimit()]
    return log


def test_lines_beyond_the_limit_are_left_out_and_counted_when_the_next_window_begins(
    limited: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for number in range(MAX_LINES + 7):
        limited.warning("line %d", number)
    assert caplog.messages == [f"line {number}" for number in range(MAX_LINES)]
    now_s += log_limit.WINDOW_S
    limited.warning("line %s", "%d")
    assert caplog.messages[-1] == "line %d (7 lines like this were left out before)"


def test_a_window_without_too_many_lines_reports_none(
    limited: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    limited.warning("one")
    now_s += log_limit.WINDOW_S
    limited.warning("two")
    assert caplog.messages == ["one", "two"]


@pytest.mark.parametrize("module", [connection, failures, json_body])
def test_log_lines_caused_by_clients_are_rate_limited(module: ModuleType) -> None:
    assert any(isinstance(each, LogLimit) for each in module.log.filters)


def test_unknown_fields_of_many_requests_are_few_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(json_body.log, "filters", [LogLimit()])
    for number in range(3 * MAX_LINES):
        parse_completion(json.dumps({"prompt": "a", f"x{number}": 1}).encode(), MODEL, LIMITS)
    assert len(caplog.messages) <= 2 * MAX_LINES
