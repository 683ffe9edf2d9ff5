"""Lists too long for one header arrive in several equivalent messages."""

import numpy as np
import pytest

from shared.errors import InvalidRequest
from shared.link.peer import Peer
from shared.wire import codec
from shared.wire.codec import decode, encode
from shared.wire.messages import (
    MAX_NAME_CHARS,
    PROTOCOL_MAJOR,
    Bye,
    Cancel,
    Credit,
    Delta,
    Deltas,
    Failed,
    Finished,
    Grant,
    Hello,
    Lost,
    Message,
    RequestKey,
    SpanReport,
    TokenRow,
    TokenRun,
    Tokens,
)
from shared.wire.token_arrays import TokenArrays

NUM = 1000
KEYS = [RequestKey(f"request-{number}", 1) for number in range(NUM)]
FINISHED = [Finished(key.request, 1, 0, "length", 3) for key in KEYS]
RUNS = [TokenRun(number % 3, number % 2, 0) for number in range(NUM)]
SPANS = [SpanReport("request-1/0", 1, "scheduler", "s", []) for _ in range(2)]


@pytest.fixture(autouse=True)
def _short_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", 2000)


def received(message: Message, arrays: TokenArrays | tuple[()] = ()) -> list[tuple]:
    """The messages received at the other end of the wire."""
    sent: list[tuple] = []

    def send(peer: Peer, part: Message, buffers: tuple) -> None:
        sent.append(decode(encode(part, buffers)))

    Peer(Hello(PROTOCOL_MAJOR, 0, "gateway", "g"), send).send(message, *arrays)
    return sent


@pytest.mark.parametrize(
    "message",
    [Cancel(KEYS), Lost(KEYS, True, "s", 2), Credit([Grant(key.request, 1, 2, 3) for key in KEYS])],
    ids=lambda message: type(message).__name__,
)
def test_lists_of_keys_are_divided(message: Cancel | Lost | Credit) -> None:
    parts = [part for part, _ in received(message)]
    assert len(parts) > 1
    name = message.__struct_fields__[0]
    assert [each for part in parts for each in getattr(part, name)] == getattr(message, name)
    others = message.__struct_fields__[1:]
    for part in parts:
        assert [getattr(part, field) for field in others] == [
            getattr(message, field) for field in others
        ]


@pytest.mark.parametrize("kind", [Tokens, Deltas])
def test_rows_take_their_tokens_with_them_and_ends_come_behind(
    kind: type[Tokens] | type[Deltas],
) -> None:
    num_tokens = sum(run.num_tokens for run in RUNS)
    num_values = sum(run.num_tokens * run.num_values for run in RUNS)
    num_ranks = sum(run.num_tokens for run in RUNS if run.num_values)
    arrays = TokenArrays(
        np.arange(num_tokens, dtype=np.int32),
        np.arange(num_values, dtype=np.float32),
        ranks=np.arange(num_ranks, dtype=np.int32),
    )
    rows: list = [
        TokenRow(key.request, 1, 0, run) if kind is Tokens else Delta(key.request, 1, 0, 0, run)
        for key, run in zip(KEYS, RUNS, strict=True)
    ]
    parts = received(kind(rows, FINISHED, SPANS), arrays)
    assert len(parts) > 1
    assert [row for part, _ in parts for row in part.rows] == rows
    assert [each for part, _ in parts for each in part.finished] == FINISHED
    assert [each for part, _ in parts for each in part.spans] == SPANS
    for index, buffer in enumerate(arrays):
        assert np.array_equal(np.concatenate([found[index] for _, found in parts]), buffer)
    first_end = next(index for index, (part, _) in enumerate(parts) if part.finished)
    assert not any(part.rows for part, _ in parts[first_end + 1 :])


def test_an_indivisible_message_is_our_mistake() -> None:
    for message in (Bye("a" * 3000), Cancel([RequestKey("a" * 3000, 1)])):
        with pytest.raises(ValueError, match="the limit is 2000"):
            received(message)


def test_a_field_of_any_length_is_named_within_the_limit_of_the_wire() -> None:
    failed = InvalidRequest("a", param="x" * 1000).to_failed("r", 1)
    assert failed.param == "x" * MAX_NAME_CHARS
    assert isinstance(decode(encode(failed))[0], Failed)
    assert InvalidRequest("a").to_failed("r", 1).param is None
