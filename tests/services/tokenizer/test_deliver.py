"""From one Tokens to the Deltas of each gateway."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.tokenizer.deliver import deliver
from services.tokenizer.metrics import DECODED_TOKENS
from services.tokenizer.open_choice import OpenChoice
from services.tokenizer.request_table import OpenRequest, RequestTable
from services.tokenizer.text_stream import TextStream
from shared.errors import CodecError
from shared.wire.messages import (
    Cancel,
    ChoiceStart,
    Deltas,
    Finished,
    Mark,
    RequestKey,
    RunKind,
    SamplingParams,
    SpanReport,
    Submit,
    TextOptions,
    TokenRow,
    TokenRun,
    Tokens,
)
from shared.wire.token_arrays import TokenArrays


@dataclass(eq=False)
class FakePeer(Any):
    sent: list[Any] = field(default_factory=list)

    def send(self, message: Any, *arrays: np.ndarray) -> None:
        self.sent.append((message, TokenArrays(*arrays)) if arrays else message)


def open_request(
    table: RequestTable,
    tokenizer: Tokenizer,
    name: str,
    gateway: FakePeer,
    num_choices: int = 1,
    stop: tuple[str, ...] = (),
    added: dict[int, str] | None = None,
    **params: Any,
) -> OpenRequest:
    starts = [ChoiceStart(index) for index in range(num_choices)]
    sampling, text = SamplingParams(seed=0, **params), TextOptions(stop=list(stop))
    request = OpenRequest(Submit(name, 1, "text", sampling, text, starts), gateway)
    request.scheduler = FakePeer()
    for index in range(num_choices):
        stream = TextStream(tokenizer.decode, stop, added=added)
        request.choices[index] = OpenChoice(index, stream, [], 0)
    table.add(request)
    return request


def tokens(
    rows: list[tuple[str, list[int]]], finished: Sequence[Finished] = (), num_values: int = 0
) -> tuple[Tokens, TokenArrays]:
    """Each row with values that count up from its ids' place."""
    message = Tokens(
        [TokenRow(name, 1, 0, TokenRun(len(ids), num_values)) for name, ids in rows], list(finished)
    )
    ids = np.array([each for _, ids in rows for each in ids], np.int32)
    ranks = np.arange(len(ids) if num_values else 0, dtype=np.int32)
    values = np.arange(len(ids) * num_values, dtype=np.float32)
    return message, TokenArrays(ids, values, ids[:0], ranks)


def test_the_end_of_a_choice_has_how_much_of_its_prompt_was_cached(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    open_request(table, tokenizer, "a", gateway, stop=("fox",))
    ids = np.array(tokenizer.encode("a fox").ids, np.int32)
    deliver(Tokens([TokenRow("a/0", 1, 0, TokenRun(len(ids)), 16)], []), TokenArrays(ids), table)
    ((deltas, _),) = gateway.sent
    assert [each.num_cached for each in deltas.finished] == [16]


def test_each_gateway_gets_one_message_with_its_rows_and_their_numbers(tokenizer: Tokenizer):
    table, first, second = RequestTable(), FakePeer(), FakePeer()
    for name, gateway in (("a", first), ("b", second), ("c", first)):
        open_request(table, tokenizer, name, gateway)
    ids = tokenizer.encode("fox").ids
    rows = [("a/0", ids), ("b/0", ids), ("gone/0", ids), ("c/0", ids)]
    assert deliver(*tokens(rows, num_values=3), table) == []
    ((deltas, arrays),) = first.sent
    assert [(row.request, row.text, row.run.num_values) for row in deltas.rows] == [
        ("a", "fox", 3),
        ("c", "fox", 3),
    ]
    num = len(ids)
    assert arrays.ids.tolist() == ids * 2
    assert arrays.ranks.tolist() == [*range(num), *range(3 * num, 4 * num)]
    assert arrays.values.tolist() == [*range(3 * num), *range(9 * num, 12 * num)]
    ((_, others),) = second.sent
    assert others.ranks.tolist() == [*range(num, 2 * num)]


def test_a_repetition_is_named_as_the_reason(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    open_request(table, tokenizer, "a", gateway)
    end = Finished("a/0", 1, 0, "repetition", 1)
    deliver(*tokens([("a/0", tokenizer.encode("f").ids)], [end]), table)
    ((deltas, _),) = gateway.sent
    ends = [(each.reason, each.stop_reason) for each in deltas.finished]
    assert ends == [("repetition", "repetition_detected")]


def test_a_stop_string_cuts_the_tokens_and_ends_the_choice_below_and_above(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    request = open_request(table, tokenizer, "a", gateway, stop=("brown",))
    ids = tokenizer.encode("quick brown fox").ids
    assert deliver(*tokens([("a/0", ids)], num_values=2), table) == [request]
    ((deltas, arrays),) = gateway.sent
    (row,), (end,) = deltas.rows, deltas.finished
    assert row.text == "quick "
    assert row.run.num_tokens < len(ids)
    assert arrays.values.tolist() == [*range(2 * row.run.num_tokens)]
    assert (end.reason, end.stop_reason, end.num_tokens) == ("stop", "brown", row.run.num_tokens)
    scheduler: Any = request.scheduler
    assert scheduler.sent == [Cancel([RequestKey("a/0", 1)])]
    assert len(table) == 0


def test_the_token_that_ends_a_text_has_no_text_but_counts_and_may_be_the_reason(
    tokenizer: Tokenizer,
):
    table, gateway = RequestTable(), FakePeer()
    ids = tokenizer.encode("fox dog").ids
    open_request(table, tokenizer, "a", gateway, stop_token_ids=[ids[-1]])
    deliver(*tokens([("a/0", ids)], [Finished("a/0", 1, 0, "stop", len(ids))]), table)
    ((deltas, _),) = gateway.sent
    assert "".join(row.text for row in deltas.rows) == tokenizer.decode(ids[:-1])
    (end,) = deltas.finished
    assert (end.num_tokens, end.stop_reason) == (len(ids), ids[-1])


def test_marks_go_out_with_the_text_at_their_place_and_at_the_end(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    end = tokenizer.token_to_id("<|end|>")
    request = open_request(table, tokenizer, "a", gateway, stop=("fox!",), added={end: ""})
    ids = [*tokenizer.encode("the fox").ids, end, end]
    finished = [Finished("a/0", 1, 0, "stop", len(ids))]
    deliver(*tokens([("a/0", ids[:-1])]), table)
    assert request.choices[0].num_tokens == len(ids) - 1
    message = Tokens([TokenRow("a/0", 1, len(ids) - 1, TokenRun(1))], finished)
    deliver(message, TokenArrays(np.array(ids[-1:], np.int32)), table)
    sent = [row for deltas, _ in gateway.sent for row in deltas.rows]
    assert [(row.text, row.marks) for row in sent] == [
        ("the ", []),
        ("fox", [Mark(7, 0, len(ids) - 2, end), Mark(7, 0, len(ids) - 1, end)]),
    ]


def test_a_request_ends_with_the_last_of_its_choices(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    request = open_request(table, tokenizer, "a", gateway, num_choices=2)
    assert deliver(*tokens([], [Finished("a/1", 1, 1, "length", 0)]), table) == []
    assert deliver(*tokens([], [Finished("a/0", 1, 0, "length", 0)]), table) == [request]
    ends = [end.choice for deltas, _ in gateway.sent for end in deltas.finished]
    assert ends == [1, 0]
    assert all(isinstance(deltas, Deltas) for deltas, _ in gateway.sent)


def test_prompt_logprobs_pass_through_and_are_no_text(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    request = open_request(table, tokenizer, "a", gateway, stop=("fox",), stop_token_ids=[7])
    request.choices[0].num_prompt_scored = 3
    prompt, drawn = [5, *tokenizer.encode("fox").ids, 7], tokenizer.encode("dog").ids
    rows = [
        TokenRow("a/0", 1, 3, TokenRun(len(prompt), 1, kind=RunKind.PROMPT)),
        TokenRow("a/0", 1, 0, TokenRun(len(drawn), 1)),
    ]
    ids = np.array(prompt + drawn, np.int32)
    values, ranks = np.arange(len(ids), dtype=np.float32), np.ones(len(ids), np.int32)
    finished = [Finished("a/0", 1, 0, "stop", len(drawn))]
    counted = DECODED_TOKENS._value.get()
    deliver(Tokens(rows, finished), TokenArrays(ids, values, ids[:0], ranks), table)
    ((deltas, arrays),) = gateway.sent
    scored, text = deltas.rows[:2]
    assert (scored.run.kind, scored.position) == (RunKind.PROMPT, 3)
    assert (scored.run.num_tokens, scored.text) == (len(prompt), "")
    assert (text.run.kind, text.position, text.run.num_tokens) == (RunKind.OUTPUT, 0, len(drawn))
    assert arrays.ids.tolist() == prompt + drawn
    assert arrays.values.tolist() == values.tolist()
    [end] = deltas.finished
    assert (end.num_tokens, end.stop_reason) == (len(drawn), None)
    assert DECODED_TOKENS._value.get() == counted + len(drawn)


def test_a_prompt_token_that_was_scored_before_is_an_error(tokenizer: Tokenizer):
    table = RequestTable()
    open_request(table, tokenizer, "a", FakePeer()).choices[0].num_prompt_scored = 3
    row = TokenRow("a/0", 1, 2, TokenRun(1, 1, kind=RunKind.PROMPT))
    one = np.ones(1, np.int32)
    with pytest.raises(CodecError, match="token 2 of the prompt came where 3 belongs"):
        deliver(Tokens([row], []), TokenArrays(one, one.astype(np.float32), one[:0], one), table)


def test_nothing_goes_out_of_a_message_with_a_row_that_cannot_be(tokenizer: Tokenizer):
    """A choice with tokens but without its end would wait for ever."""
    table, gateway = RequestTable(), FakePeer()
    for name in "ab":
        open_request(table, tokenizer, name, gateway)
    rows = [TokenRow("a/0", 1, 0, TokenRun(1)), TokenRow("b/0", 1, 3, TokenRun(1))]
    message = Tokens(rows, [Finished("a/0", 1, 0, "length", 1)])
    with pytest.raises(CodecError, match="b/0: token 3 came where 0 belongs"):
        deliver(message, TokenArrays(np.ones(2, np.int32)), table)
    assert gateway.sent == []
    assert table.get("a", 1).choices[0].num_tokens == 0


def test_reports_are_dropped_where_nothing_observes(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    open_request(table, tokenizer, "a", gateway)
    deliver(Tokens([], [], [SpanReport("a/0", 1, "scheduler", "s", [])]), TokenArrays(), table)
    assert gateway.sent == []
