"""Files of results: appended to, read again, truncated after a writer's death."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.batch.lines import LineError
from shared.batch.results import (
    NotWritten,
    ResultFile,
    WrongResults,
    result_of_error,
    result_of_reply,
)
from shared.client.sender import Reply

GOOD = Reply(200, "r1", b'{"text":"yes"}')
BAD = Reply(400, "r2", b'{"error":{}}')


def test_results_have_openais_shape(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, "b1") as file:
        file.append(result_of_reply("b1", 3, "x", GOOD))
        file.append(result_of_error("b1", LineError(4, "invalid_url", "line 4: url", "url", "y")))
    assert [json.loads(text) for text in path.read_text().splitlines()] == [
        {
            "id": "batch_req_b1_3",
            "custom_id": "x",
            "response": {"status_code": 200, "request_id": "r1", "body": {"text": "yes"}},
            "error": None,
        },
        {
            "id": "batch_req_b1_4",
            "custom_id": "y",
            "response": None,
            "error": {"code": "invalid_url", "message": "line 4: url", "param": "url", "line": 4},
        },
    ]


def test_finished_results_are_read_and_a_cut_line_removed(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, "b1") as file:
        file.append(result_of_reply("b1", 3, "x", GOOD))
        file.append(result_of_reply("b1", 1, "y", BAD))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    with ResultFile(path, "b1") as file:
        assert [*file.read_done()] == [(3, True), (1, False)]
        assert path.read_bytes() == whole
        file.append(result_of_reply("b1", 2, "z", GOOD))
        assert [number for number, _ in file.read_done()] == [3, 1, 2]


@pytest.mark.parametrize(
    "text", ["notes of mine\n", '{"id": "batch_req_b2_1", "response": null}\n']
)
def test_a_file_of_something_else_is_refused_and_stays_as_it_is(tmp_path: Path, text: str):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with ResultFile(path, "b1") as file, pytest.raises(WrongResults, match=r"line 1, is no result"):
        [*file.read_done()]
    assert path.read_text() == text


def test_two_writers_are_one_too_many(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, "b1"), pytest.raises(WrongResults, match="another process"):
        ResultFile(path, "b1")
    with ResultFile(path, "b1"):
        pass


def test_a_path_that_is_no_file_is_refused(tmp_path: Path):
    with pytest.raises(WrongResults, match="is no file"):
        ResultFile(Path("/dev/null"), "b1")
    with pytest.raises(NotWritten, match="No such file"):
        ResultFile(tmp_path / "none" / "out.jsonl", "b1")


FILLS_UP = """
import resource, signal, sys
from pathlib import Path
from shared.batch.results import NotWritten
from shared.batch.results import ResultFile, result_of_reply
from shared.client.sender import Reply
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with ResultFile(Path(sys.argv[1]), "b1") as file:
    try:
        for number in range(1, 100):
            file.append(result_of_reply("b1", number, "x", Reply(200, "", b"{}")))
    except NotWritten as error:
        print(error)
"""


def test_a_line_for_which_there_is_no_room_leaves_nothing(tmp_path: Path):
    """The kernel writes the part of a line that fits, as on a full disk."""
    path = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", FILLS_UP, str(path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == f"{path}: File too large\n"
    assert path.read_bytes().endswith(b"\n")
    assert 900 < path.stat().st_size <= 1000
    with ResultFile(path, "b1") as file:
        numbers = [number for number, _ in file.read_done()]
    assert numbers == list(range(1, len(numbers) + 1))
