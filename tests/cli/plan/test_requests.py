import json
from pathlib import Path
from typing import Any

import pytest

from cli.plan.requests import Request, at_rate, describe, enough_len, made_up, read
from shared.errors import ConfigError


def num_words(text: str) -> int:
    return len(text.split())


def log_of(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 3}, Request(7, 3)),
        ({"usage": {"prompt_tokens": 7, "completion_tokens": 3}}, Request(7, 3)),
        ({"num_prompt_tokens": 7, "num_output_tokens": 3}, Request(7, 3)),
        ({"prompt": "three words here", "max_tokens": 9}, Request(3, 9, is_bound=True)),
        ({"prompt": [5, 6]}, Request(2, 40, is_bound=True)),
        ({"messages": [{"role": "user", "content": "two words"}]}, Request(2, 40, is_bound=True)),
        ({"prompt_tokens": 1, "timestamp": 2.5, "completion_tokens": 1}, Request(1, 1, 2.5)),
        (
            {
                "prompt_tokens": 1,
                "completion_tokens": 1,
                "timestamp": "1970-01-01T00:00:02.5000000Z",
            },
            Request(1, 1, 2.5),
        ),
    ],
)
def test_a_line_of_any_format_is_a_request(
    tmp_path: Path, line: dict[str, Any], expected: Request
) -> None:
    assert read(log_of(tmp_path, line), num_words, 40) == [expected]


def test_of_a_gateways_log_the_ends_of_requests_count_from_their_beginning(tmp_path: Path) -> None:
    ended = {"time": "1970-01-01T00:00:10.000Z", "message": "request ended", "route": "/v1/chat"}
    counted = ended | {"num_prompt_tokens": 5, "num_output_tokens": 6, "total_s": 4.0}
    earlier = counted | {"time": "1970-01-01T00:00:05.000Z", "total_s": 0.5}
    refused = ended | {"status": 400, "total_s": 0.1}
    other = {"time": "1970-01-01T00:00:01.000Z", "message": "ready"}
    found = read(log_of(tmp_path, other, earlier, counted, refused), num_words, 40)
    assert [each.arrived_s for each in found] == [4.5, 6.0]


def test_lines_of_serve_between_log_lines_are_skipped(tmp_path: Path) -> None:
    path = log_of(tmp_path, {"prompt_tokens": 7, "completion_tokens": 3})
    path.write_text(f"worker 0.1: ready\n{path.read_text()}\nready after 2.4 s: http://a/v1\n")
    assert read(path, num_words, 40) == [Request(7, 3)]
    path.write_text(f'{path.read_text()}{{"prompt_tokens": 7')
    with pytest.raises(ConfigError, match="line 4: Input data was truncated"):
        read(path, num_words, 40)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([{"prompt_tokens": 3}, {"prompt_tokens": 0}], "line 2: needs prompt_tokens"),
        ([{"prompt_tokens": "three"}], "line 1: Expected"),
        ([{"message": "ready"}], "has no request"),
        ([{"prompt_tokens": 1, "timestamp": 1.0}, {"prompt_tokens": 1}], "1 of 2 lines have no"),
    ],
)
def test_an_error_in_a_log_names_its_line(
    tmp_path: Path, lines: list[dict[str, Any]], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(log_of(tmp_path, *lines), num_words, 40)


def test_lengths_and_arrivals_are_described() -> None:
    requests = at_rate(made_up(range(1, 101), [10] * 100), 5.0)
    found = describe(requests)
    assert found["prompt_tokens"] == pytest.approx(
        {"mean": 50.5, "p50": 50.5, "p95": 95.05, "p99": 99.01, "max": 100}
    )
    assert found["per_s"]["mean"] == pytest.approx(5.0, rel=0.25)


def test_the_length_that_is_enough_is_that_of_the_99th_percentiles_up_to_the_models() -> None:
    requests = made_up([1000] * 99 + [5000], [100] * 100)
    assert enough_len(requests, 32_768) == 1280
    assert enough_len(requests, 1024) == 1024
