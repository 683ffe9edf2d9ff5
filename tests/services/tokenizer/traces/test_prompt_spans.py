"""Spans of prompts, and the gateways that get reports about them."""

import numpy as np
import pytest

from services.tokenizer.deliver import deliver
from services.tokenizer.observer import UNOBSERVED
from services.tokenizer.request_table import OpenRequest, RequestTable
from services.tokenizer.traces import prompt_spans
from services.tokenizer.traces.prompt_spans import Prompts
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import (
    ChoiceStart,
    SamplingParams,
    SpanReport,
    Submit,
    TextOptions,
    Tokens,
)
from shared.wire.token_arrays import TokenArrays
from tests.services.tokenizer.test_deliver import FakePeer

NO_ARRAYS = TokenArrays(np.zeros(0, np.int32))


def opened(
    table: RequestTable, name: str, gateway: FakePeer, is_traced: bool = True
) -> OpenRequest:
    options = write_options(RequestOptions(is_traced=is_traced))
    starts = [ChoiceStart(0, num_ids=3)]
    submit = Submit(name, 1, "text", SamplingParams(seed=0), TextOptions(), starts, options=options)
    request = OpenRequest(submit, gateway)
    table.add(request)
    return request


def report_of(name: str) -> SpanReport:
    return SpanReport(f"{name}/0", 1, "worker", "w", [])


def test_steps_are_spans_within_the_prompt() -> None:
    prompts = Prompts("t")
    table, gateway = RequestTable(prompts), FakePeer()
    request = opened(table, "a", gateway)
    request.observer.note_thread()
    with request.observer.measure("history") as attributes:
        attributes["num_dropped_turns"] = 2
    for _ in range(2):
        request.observer.note_tokens()
    assert prompts.take_reports() == []
    table.pop(request, "finished")
    ((to, report),) = prompts.take_reports()
    assert to is gateway
    assert (report.request, report.attempt, report.instance) == ("a", 1, "t")
    assert [(span.name, span.parent, span.attributes) for span in report.spans] == [
        ("prompt", 0, {"reason": "finished", "attempt": 1, "kind": "text",
                       "num_prompt_tokens": 0, "num_resumed_tokens": 3}),
        ("queue", 1, {"reason": "threads"}),
        ("history", 1, {"num_dropped_turns": 2}),
        ("decode", 1, {"num_deliveries": 2}),
    ]  # fmt: skip
    assert prompts.take_reports() == []


def test_an_untraced_prompt_has_no_spans_and_reports_about_it_are_dropped() -> None:
    prompts = Prompts("t")
    table = RequestTable(prompts)
    request = opened(table, "a", FakePeer(), is_traced=False)
    assert request.observer is UNOBSERVED
    prompts.forward(report_of("a"))
    table.pop(request, "finished")
    assert prompts.take_reports() == []


def test_reports_go_to_the_gateway_of_their_prompt_after_its_end_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_spans, "MAX_ENDED", 1)
    table, gateways = RequestTable(Prompts("t")), {name: FakePeer() for name in "abc"}
    requests = [opened(table, name, gateway) for name, gateway in gateways.items()]
    for request in requests[:2]:
        table.pop(request, "finished")
    deliver(Tokens([], [], [report_of(name) for name in "abc"]), NO_ARRAYS, table)
    sent = {name: gateway.sent[0][0].spans for name, gateway in gateways.items()}
    assert [each.service for each in sent["a"]] == ["tokenizer"], "too many have ended since"
    assert [each.service for each in sent["b"]] == ["tokenizer", "worker"]
    assert sent["c"] == [report_of("c")]
