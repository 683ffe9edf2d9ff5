"""The lines of a batch file: valid ones, and errors of others."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.batch.check import check
from shared.batch.lines import BatchLine, LineError, parse_line, read_lines

LIMIT = 1000


def line(custom_id: str = "a", **fields: Any) -> dict[str, Any]:
    whole = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"n": 1}}
    return whole | fields


def write(path: Path, *lines: Any) -> Path:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def parsed(fields: Any) -> BatchLine | LineError:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return parse_line((7, text), LIMIT)


def test_a_line_is_its_number_id_url_and_body():
    found = parsed(line("x", body={"prompt": "ä"}))
    assert isinstance(found, BatchLine)
    assert (found.number, found.custom_id, found.url) == (7, "x", "/v1/completions")
    assert json.loads(bytes(found.body)) == {"prompt": "ä"}


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        (b"{not json", "invalid_json_line", "line 7 is not JSON"),
        (b"\xff\xfe", "invalid_json_line", "line 7"),
        ([1], "invalid_line", "line 7"),
        (b'{"custom_id": "a", "method": 5, broken', "invalid_line", "method"),
        (b'{"custom_id": 5, "body": ' + b"[" * 5000, "invalid_line", "custom_id"),
        ({"custom_id": "a"}, "invalid_line", "method"),
        (line() | {"custom_id": 3}, "invalid_line", "custom_id"),
        (line(""), "invalid_custom_id", "0 characters"),
        (line("x" * 513), "invalid_custom_id", "513 characters"),
        (line(method="GET"), "invalid_method", "'GET'"),
        (line(url="/v1/batches"), "invalid_url", "'/v1/batches'"),
        (line(url="http://evil/v1/completions"), "invalid_url", "'http://evil"),
        (line(body=[1]), "invalid_line", "body is not an object"),
        (line(body={"stream": True}), "unsupported_parameter", "body.stream"),
    ],
)
def test_an_error_names_line_and_field(fields: Any, code: str, words: str):
    found = parsed(fields)
    assert isinstance(found, LineError)
    assert (found.number, found.code) == (7, code)
    assert words in found.message


def test_a_wrong_line_keeps_the_id_that_it_has():
    assert parsed(line("mine", method="GET")).custom_id == "mine"
    assert parsed({"custom_id": "mine"}).custom_id == "mine"
    assert parsed({"custom_id": 3}).custom_id is None


def test_only_the_endpoint_of_the_batch_is_allowed():
    text = json.dumps(line()).encode()
    found = parse_line((1, text), LIMIT, "/v1/embeddings")
    assert isinstance(found, LineError)
    assert found.code == "mismatched_url"


def test_lines_are_numbered_as_an_editor_does_and_a_long_one_is_not_held(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\n\n  \nb\n" + b"c" * 3_000_000 + b"\nd")
    assert [*read_lines(path, 10)] == [(1, b"a\n"), (4, b"b\n"), (5, None), (6, b"d")]
    found = parse_line((5, None), 10)
    assert isinstance(found, LineError)
    assert found.code == "line_too_long"


def test_a_line_of_just_the_limit_is_read(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 10 + b"\n" + b"y" * 10 + b"\n" + b"z" * 11)
    assert [text for _, text in read_lines(path, 10)] == [
        b"x" * 10 + b"\n",
        b"y" * 10 + b"\n",
        None,
    ]


def test_a_file_is_counted_and_its_wrong_lines_named(tmp_path: Path):
    path = write(tmp_path / "in.jsonl", line("a"), "", "{", line("b"), line("c", method="PUT"))
    found = check(path, LIMIT)
    assert (found.num_requests, found.num_lines, found.num_errors) == (4, 5, 2)
    assert [each.number for each in found.errors] == [3, 5]
    assert found.duplicates == []


def test_an_id_that_comes_again_is_named_with_both_lines(tmp_path: Path):
    again = [line("b"), line("a", method="GET"), line("c"), line("b")]
    path = write(tmp_path / "in.jsonl", line("a"), *again)
    found = check(path, LIMIT).duplicates
    assert [each.message for each in found] == [
        "custom_id 'a' is in line 1 and in line 3",
        "custom_id 'b' is in line 2 and in line 5",
    ]


def test_the_digest_changes_with_the_content(tmp_path: Path):
    one = check(write(tmp_path / "1", line("a")), LIMIT).digest
    assert one == check(write(tmp_path / "2", line("a")), LIMIT).digest
    assert one != check(write(tmp_path / "3", line("a", body={"n": 2})), LIMIT).digest
