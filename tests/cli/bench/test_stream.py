import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.stream import Stream, StreamError, message_of_body


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def completion(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": finish_reason}], "usage": None})


def chat(**delta: object) -> bytes:
    return event({"choices": [{"delta": delta, "finish_reason": None}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "more": {}}})
DONE = b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, 400), max_size=20))
def test_an_answer_is_read_the_same_wherever_the_network_cuts_it(cuts: list[int]):
    whole = b": hello\n\n" + completion("a") + completion("é", "length") + USAGE + DONE
    stream = Stream()
    places = sorted({0, *(min(cut, len(whole)) for cut in cuts), len(whole)})
    for now, (begin, end) in enumerate(pairwise(places)):
        stream.feed(whole[begin:end], float(now))
    usage = stream.end()
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 3)
    assert stream.first_s is not None
    assert stream.gaps_s == [stream.last_s - stream.first_s]


def test_gaps_lie_between_chunks_with_tokens_only():
    stream = Stream()
    parts = [
        (1.0, chat(role="assistant", content="")),
        (2.0, chat(content="a")),
        (2.5, chat(content="b") + chat(content="c")),
        (3.5, chat(reasoning="d")),
        (5.5, chat(reasoning_content="e")),
        (6.0, chat(tool_calls=[{"index": 0}])),
        (9.0, event({"choices": [{"delta": {}, "finish_reason": "stop"}]}) + USAGE + DONE),
    ]
    for now_s, data in parts:
        stream.feed(data, now_s)
    assert stream.first_s == 2.0
    assert stream.last_s == 6.0
    assert stream.gaps_s == [0.5, 0.0, 1.0, 2.0, 0.5]


def test_a_token_of_a_completion_counts_before_its_text_shows():
    stream = Stream()
    for now_s, data in (
        (1.0, completion("")),
        (2.0, completion("é")),
        (4.0, completion("", "stop")),
    ):
        stream.feed(data, now_s)
    assert (stream.first_s, stream.gaps_s) == (1.0, [1.0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (event({"error": {"message": "lost it", "code": 500}}), "lost it"),
        (event({"error": "short"}), "short"),
        (b"data: {oops}\n\n", "not an event"),
        (event({"choices": 3}), "not an event"),
    ],
)
def test_an_error_within_the_stream_is_raised(data: bytes, message: str):
    with pytest.raises(StreamError, match=message):
        Stream().feed(completion("a") + data, 0.0)


@pytest.mark.parametrize(
    ("data", "message"), [(USAGE, "DONE"), (DONE, "no usage"), (b"", "DONE"), (DONE[:-2], "DONE")]
)
def test_an_answer_without_its_end_is_not_whole(data: bytes, message: str):
    stream = Stream()
    stream.feed(data, 0.0)
    with pytest.raises(StreamError, match=message):
        stream.end()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too many"}}', "too many"),
        (b'{"message": "old style"}', "old style"),
        (b'{"detail": "x"}', "{'detail': 'x'}"),
        (b"[3]", "[3]"),
        (b" plain\n", "plain"),
        (b"two\nlines \x1b[31m", "two lines  [31m"),
        (b"\xff" * 500, "\ufffd" * 200),
    ],
)
def test_a_refusal_is_reported_in_the_words_of_the_server(body: bytes, message: str):
    assert message_of_body(body) == message
