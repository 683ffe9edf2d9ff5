"""The content of a body is bounded before it is decoded."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.chat.requests import token_ids
from services.gateway.chat.requests.parse import parse_chat, parse_completion
from services.gateway.chat.requests.raw_json import MAX_FIELD_BYTES
from services.gateway.chat.requests.schema import MAX_FIELDS, MAX_MESSAGES
from services.gateway.http.body import MAX_INLINE_BYTES, BodyParser
from shared.errors import InvalidRequest
from tests.services.gateway.fakes import LIMITS, MODEL

ROOT = Path(__file__).parents[3]
MESSAGE: Any = {"role": "user", "content": "Hi"}
BODY_BYTES = 16 << 20

GROWTH = """
import resource, sys
import msgspec
from services.gateway.chat.requests.parse import Limits, parse_chat, parse_completion
from shared.wire.messages import ModelInfo

def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

model = ModelInfo(["fish"], "f", vocab_size=50_000, max_model_len=1 << 24, created=1)
parse = parse_completion if sys.argv[1] == "completion" else parse_chat
before = peak()
with open(sys.argv[2], "rb") as file:
    body = file.read()
try:
    parse(body, model, Limits(8, 20))
except Exception as error:
    print(type(error).__name__, file=sys.stderr)
print((peak() - before) / len(body))
"""


def refused(body: bytes, parse: Any = parse_completion) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse(body, MODEL, LIMITS)
    return error.value


def filled(beginning: bytes, piece: bytes, end: bytes) -> bytes:
    return beginning + piece * (BODY_BYTES // len(piece)) + end


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("completion", filled(b'{"prompt":[', b"12345,", b"1]}")),
        ("completion", filled(b'{"prompt":"a","tools":[', b"{},", b"{}]}")),
        ("chat", filled(b'{"messages":[', b"{},", b"{}]}")),
        *(
            pytest.param(kind, filled(*parts), marks=pytest.mark.slow)
            for kind, *parts in (
                ("completion", b'{"prompt":[', b"1, ", b"1]}"),
                ("completion", b'{"prompt":[', b"[],", b"[1]]}"),
                ("completion", b'{"prompt":[', b'"a",', b'"a"]}'),
                ("completion", b'{"prompt":"a","stop":[', b'"a",', b'"a"]}'),
                ("completion", b'{"prompt":"a","logit_bias":{', b'"1":1,', b'"2":1}}'),
                ("completion", b"{", b'"a":1,', b'"prompt":"a"}'),
                ("completion", b'{"prompt":"', b"x", b'"}'),
                ("chat", b'{"messages":[', b'{"role":"user","content":"a"},', b"{}]}"),
            )
        ),
    ],
    ids=lambda value: value[:36].decode() if isinstance(value, bytes) else value,
)
def test_no_body_takes_four_times_its_size(tmp_path: Path, kind: str, body: bytes) -> None:
    (tmp_path / "body").write_bytes(body)
    command = [sys.executable, "-c", GROWTH, kind, str(tmp_path / "body")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) <= 4, done.stderr


@pytest.mark.parametrize("prompt", [[1] * 65, [[1], [1] * 65]])
def test_more_ids_than_the_context_holds_are_refused_with_both_numbers(prompt: Any) -> None:
    error = refused(json.dumps({"prompt": prompt}).encode())
    assert error.param == ("prompt" if prompt[0] == 1 else "prompt[1]")
    assert error.code == "context_length_exceeded"
    assert error.message == f"{error.param} has 65 ids; the limit is max-model-len = 64"
    job = parse_completion(json.dumps({"prompt": [1] * 64}).encode(), MODEL, LIMITS)
    assert len(job.prompts[0].data) == MODEL.max_model_len


@given(
    st.lists(st.integers(0, MODEL.vocab_size - 1), max_size=64), st.sampled_from([None, 1, "\t"])
)
def test_ids_read_in_pieces_match_the_sent_ones(ids: list[int], indent: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_ids, "PARSE_CHUNK_BYTES", 5)
        text = msgspec.Raw(json.dumps(ids, indent=indent).encode())
        read = token_ids.read_ids(text, MODEL, "prompt")
    assert read.tolist() == ids


@pytest.mark.parametrize(
    "wrong", ["a,b,c,d,e", [1, 2, 3], {"a": [1, 2]}, -1, 2**31, 1.5, None, True]
)
def test_an_invalid_id_is_named_wherever_pieces_end(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_ids, "PARSE_CHUNK_BYTES", 5)
    error = refused(json.dumps({"prompt": [1, 2, 3, 4, 5, wrong, 6, 7]}).encode())
    assert error.param == "prompt[5]"


def test_more_messages_than_the_limit_are_refused() -> None:
    body = json.dumps({"messages": [MESSAGE] * MAX_MESSAGES}).encode()
    assert parse_chat(body, MODEL, LIMITS).prompts
    error = refused(json.dumps({"messages": [MESSAGE] * (MAX_MESSAGES + 1)}).encode(), parse_chat)
    assert error.param == "messages"
    assert str(MAX_MESSAGES) in error.message


def test_more_fields_than_the_limit_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fields = {f"k{number}": 1 for number in range(MAX_FIELDS - 1)}
    assert parse_completion(json.dumps(fields | {"prompt": "a"}).encode(), MODEL, LIMITS).prompts
    assert len(caplog.text) < 1000
    error = refused(json.dumps(fields | {"prompt": "a", "k": 1}).encode())
    assert str(MAX_FIELDS) in error.message


def test_one_field_many_times_is_many_fields() -> None:
    assert str(MAX_FIELDS) in refused(b'{"n":1' + b',"n":1' * MAX_FIELDS + b"}").message


@pytest.mark.parametrize("name", ["stop", "logit_bias", "seed", "model"])
def test_a_field_that_is_no_prompt_has_a_limit_in_bytes(name: str) -> None:
    value = "x" * MAX_FIELD_BYTES
    error = refused(json.dumps({"prompt": "a", name: value}).encode())
    assert error.param == name
    assert f"{MAX_FIELD_BYTES + 2} bytes; the limit is {MAX_FIELD_BYTES}" in error.message


def test_the_longest_values_that_are_allowed_fit_a_field() -> None:
    stop, words = ["\U0001f41f" * 1000] * 16, ["\U0001f41f" * 100] * 128
    body = json.dumps({"prompt": "a", "stop": stop, "bad_words": words}).encode()
    assert parse_completion(body, MODEL, LIMITS).text.stop == stop


def test_unsupported_fields_are_refused_at_any_size() -> None:
    error = refused(json.dumps({"prompt": "a", "suffix": "x" * MAX_FIELD_BYTES}).encode())
    assert error.param == "suffix"
    assert "not supported" in error.message
    assert len(error.message) < 300


def test_a_body_that_is_parsed_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytearray(json.dumps({"prompt": ["fish"], "user": "ada"}).encode())
    job = parse_completion(body, MODEL, LIMITS)
    body.clear()  # raises BufferError while anything refers to it
    assert job.prompts[0].data.tobytes() == b"fish"
    assert msgspec.json.encode(job.params)


async def test_large_bodies_are_parsed_one_after_the_other() -> None:
    parser, body = BodyParser(), b" " * (MAX_INLINE_BYTES + 1)
    num_at_once, most = 0, 0

    def parse(_: Any) -> None:
        nonlocal num_at_once, most
        num_at_once += 1
        most = max(most, num_at_once)
        time.sleep(0.01)
        num_at_once -= 1

    try:
        await asyncio.gather(*(parser.parse(body, parse) for _ in range(5)))
    finally:
        parser.close()
    assert most == 1
