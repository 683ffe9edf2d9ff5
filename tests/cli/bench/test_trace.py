import json
from pathlib import Path

import pytest

from cli.bench.trace import parse, read
from shared.errors import ConfigError

CHAT = [{"role": "user", "content": "Hi"}]


def text_of(*lines: object) -> bytes:
    return "\n".join(json.dumps(line) for line in lines).encode()


def test_lines_keep_their_order_unless_their_times_count():
    text = text_of({"prompt": "b", "timestamp": 9}, {"prompt": [1, 2], "timestamp": 3.5})
    assert [line.prompt for line in parse(text, "completions", False)] == ["b", [1, 2]]
    assert [line.prompt for line in parse(text, "completions", True)] == [[1, 2], "b"]


def test_a_prompt_may_be_asked_in_a_chat_and_empty_lines_are_none():
    text = b"\n" + text_of({"prompt": "Hi", "other": 1}) + b"\n\n" + text_of({"messages": CHAT})
    lines = parse(text, "chat", False)
    assert [line.content("chat") for line in lines] == [{"messages": CHAT}] * 2


@pytest.mark.parametrize(
    ("endpoint", "line", "message"),
    [
        ("completions", {}, "either prompt or messages"),
        ("chat", {"prompt": "a", "messages": CHAT}, "either prompt or messages"),
        ("completions", {"messages": CHAT}, "--endpoint chat only"),
        ("chat", {"prompt": [1]}, "--endpoint completions only"),
        ("chat", {"prompt": "a"}, "no timestamp"),
        ("completions", {"prompt": 3}, r"\$.prompt"),
        ("completions", {"prompt": "a", "max_tokens": 0}, r"\$.max_tokens"),
        ("completions", "a", "Expected `object`"),
    ],
)
def test_a_line_that_is_no_request_is_named_by_its_number(endpoint, line, message):
    good = {"prompt": "a", "timestamp": 0} if endpoint == "completions" else {"messages": CHAT}
    needs_timestamp = message == "no timestamp"
    first = good | {"timestamp": 1}
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        parse(text_of(first, line), endpoint, needs_timestamp)


def test_a_file_that_is_not_there_or_empty_is_a_wrong_setting(tmp_path: Path):
    (tmp_path / "empty").write_bytes(b"\n")
    for name, message in (("missing", "cannot read .*No such file"), ("empty", "has no line")):
        with pytest.raises(ConfigError, match=message):
            read(tmp_path / name, "chat", False)
