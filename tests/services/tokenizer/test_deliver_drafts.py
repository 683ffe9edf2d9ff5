"""Drafts on their way up, next to their target tokens."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.tokenizer.deliver import deliver
from services.tokenizer.metrics import DECODED_TOKENS
from services.tokenizer.request_table import RequestTable
from shared.errors import CodecError
from shared.wire.messages import Finished, RunKind, TokenRow, TokenRun, Tokens
from shared.wire.token_arrays import TokenArrays
from tests.services.tokenizer.test_deliver import FakePeer, open_request

NUM_DRAFTS, NUM_VALUES = 5, 21  # six tokens per row


def speculated(ids: list[int], num_accepted: int) -> tuple[Tokens, TokenArrays]:
    """The rows of ``a/0`` after a step that verified five drafts: each value of the payload is its
    index."""
    drafts = TokenRow(
        "a/0", 1, 0, TokenRun(NUM_DRAFTS, 1, kind=RunKind.DRAFTS, num_accepted=num_accepted)
    )
    text = TokenRow(
        "a/0",
        1,
        0,
        TokenRun(
            len(ids), NUM_VALUES, NUM_VALUES - 1, num_drafts=NUM_DRAFTS, num_accepted=num_accepted
        ),
    )
    num = len(ids)
    return Tokens([drafts, text], []), TokenArrays(
        np.array([*range(NUM_DRAFTS), *ids], np.int32),
        np.arange(NUM_DRAFTS + num * NUM_VALUES, dtype=np.float32),
        np.arange(num * (NUM_VALUES - 1), dtype=np.int32),
        np.arange(NUM_DRAFTS + num, dtype=np.int32),
    )


def test_drafts_go_before_the_tokens_they_were_for_and_are_no_text(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    request = open_request(table, tokenizer, "a", gateway)
    ids = tokenizer.encode("quick brown fox").ids[:6]
    counted = DECODED_TOKENS._value.get()
    message, sent = speculated(ids, num_accepted=5)
    deliver(message, sent, table)
    ((deltas, arrays),) = gateway.sent
    drafts, text = deltas.rows
    assert (drafts.run.kind, drafts.position, drafts.run.num_tokens) == (RunKind.DRAFTS, 0, 5)
    assert drafts.text == ""
    assert (drafts.run.num_drafts, drafts.run.num_accepted) == (0, 5)
    assert (text.run.kind, text.position, text.run.num_tokens) == (RunKind.OUTPUT, 0, 6)
    assert (text.run.num_drafts, text.run.num_accepted) == (5, 5)
    assert text.text == tokenizer.decode(ids)
    assert all(np.array_equal(*pair) for pair in zip(arrays, sent, strict=True))
    assert request.choices[0].num_tokens == 6
    assert DECODED_TOKENS._value.get() == counted + 6


def test_of_drafts_behind_a_stop_string_none_is_accepted(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    open_request(table, tokenizer, "a", gateway, stop=("c",))
    ids = tokenizer.encode("quick brown fox").ids[:6]
    num = 1 + next(i for i, token in enumerate(ids) if "c" in tokenizer.decode([token]))
    assert num < 5
    message, sent = speculated(ids, num_accepted=5)
    deliver(message, sent, table)
    ((deltas, arrays),) = gateway.sent
    drafts, text = deltas.rows
    assert (drafts.run.num_tokens, drafts.run.num_accepted) == (5, num)
    assert text.run == TokenRun(num, NUM_VALUES, NUM_VALUES - 1, num_drafts=5, num_accepted=num)
    assert deltas.finished[0].num_tokens == num
    assert arrays.values.tolist() == [*range(NUM_DRAFTS + num * NUM_VALUES)]
    assert arrays.top_ids.tolist() == [*range(num * (NUM_VALUES - 1))]
    assert arrays.ranks.tolist() == [*range(NUM_DRAFTS + num)]


def test_a_stop_string_behind_the_accepted_drafts_takes_none_of_them_away(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    open_request(table, tokenizer, "a", gateway, stop=("c",))
    ids = tokenizer.encode("quick brown fox").ids[:6]
    deliver(*speculated(ids, num_accepted=1), table)
    ((deltas, _),) = gateway.sent
    assert [row.run.num_accepted for row in deltas.rows] == [1, 1]


def test_only_the_last_of_several_rows_ends_the_text(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    open_request(table, tokenizer, "a", gateway)
    first, second = tokenizer.encode("quick brown fox").ids[:2]
    rows = [
        TokenRow("a/0", 1, 0, TokenRun(1, 1)),
        TokenRow("a/0", 1, 1, TokenRun(1, 1, kind=RunKind.DRAFTS, num_accepted=1)),
        TokenRow("a/0", 1, 1, TokenRun(2, 1, num_drafts=1, num_accepted=1)),
    ]
    ids = np.array([first, second, second, first], np.int32)
    arrays = TokenArrays(ids, ids.astype(np.float32), ids[:0], ids)
    deliver(Tokens(rows, [Finished("a/0", 1, 0, "stop", 3)]), arrays, table)
    ((deltas, _),) = gateway.sent
    text = "".join(row.text for row in deltas.rows)
    assert text == tokenizer.decode([first, second])


def test_each_choice_gets_the_drafts_of_its_own(tokenizer: Tokenizer):
    table, gateway = RequestTable(), FakePeer()
    open_request(table, tokenizer, "a", gateway, num_choices=2)
    rows = [
        TokenRow("a/0", 1, 0, TokenRun(1, 1, kind=RunKind.DRAFTS)),
        TokenRow("a/0", 1, 0, TokenRun(1, 1, num_drafts=1)),
        TokenRow("gone/0", 1, 7, TokenRun(1, 1, kind=RunKind.DRAFTS)),
        TokenRow("gone/0", 1, 7, TokenRun(1, 1, num_drafts=1)),
        TokenRow("a/1", 1, 0, TokenRun(1, 1)),
    ]
    numbers = np.arange(5, dtype=np.int32)
    arrays = TokenArrays(numbers, numbers.astype(np.float32), numbers[:0], numbers)
    deliver(Tokens(rows, []), arrays, table)
    ((deltas, sent),) = gateway.sent
    assert [(row.choice, row.run.kind) for row in deltas.rows] == [
        (0, RunKind.DRAFTS),
        (0, RunKind.OUTPUT),
        (1, RunKind.OUTPUT),
    ]
    assert sent.ids.tolist() == [0, 1, 4]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [TokenRow("a/0", 1, 1, TokenRun(1, 1, kind=RunKind.DRAFTS))],
            "token 1 came where 0 belongs",
        ),
        (
            [TokenRow("a/0", 1, 0, TokenRun(1, 1, kind=RunKind.DRAFTS))],
            "without the tokens they are for: a/0",
        ),
    ],
)
def test_drafts_of_missing_tokens_are_an_error(
    tokenizer: Tokenizer, rows: list[TokenRow], words: str
):
    table = RequestTable()
    open_request(table, tokenizer, "a", FakePeer())
    one = np.ones(1, np.int32)
    with pytest.raises(CodecError, match=words):
        deliver(Tokens(rows, []), TokenArrays(one, one.astype(np.float32), one[:0], one), table)
