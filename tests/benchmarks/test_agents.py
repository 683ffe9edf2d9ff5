"""Recorded sessions of coding agents keep their structure and none of their words."""

import json
import lzma
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents.convert import Words, convert

RECORDED = Path(__file__).parent.parent / "mesh" / "recorded" / "agents"
KEY = b"fish"
CALL = {
    "name": "Read",
    "arguments": '{"path": "a/pond.py", "deep": false, "names": ["ide", "koi"]}',
}
TOOL: dict[str, Any] = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"enum": ["pond", "sea"]}}},
}


def request(*texts: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text, "cache_control": None} for text in texts]
    body = {"messages": [{"role": "user", "content": content}], "tools": [TOOL]} | fields
    return {"path": "/v1/messages", "body": body, "reply": {"text": "Two fish.", "calls": [CALL]}}


def converted(*requests: dict[str, Any]) -> Any:
    return convert({"requests": list(requests)}, KEY)["requests"]


def test_texts_keep_their_lengths_and_shared_parts():
    before = "Count the fish\tin café 12 of POND, not the Pond's \\d fish."
    after = Words(KEY).text(before)
    assert len(after) == len(before)
    assert not set(re.findall(r"[a-z]{3,}", before.lower())) & set(re.findall(r"[a-z]+", after))
    count, the, fish, *_ = after.split()
    assert (the, f"{fish}.") == (after.split()[9], after.split()[-1])
    assert re.sub(r"[A-Za-z]{3,}", "", after) == re.sub(r"[A-Za-z]{3,}", "", before)
    assert count[0].isupper()
    assert Words(b"sea").text(before) != after


def test_structure_stays():
    sent, again = converted(request("Count fish."), request("Count fish.", system="Be kind."))
    (message,) = sent["body"]["messages"]
    assert message["role"] == "user"
    assert message["content"][0].keys() == {"type", "text", "cache_control"}
    assert again["body"]["messages"] == sent["body"]["messages"]
    (tool,) = sent["body"]["tools"]
    assert tool | {"description": TOOL["description"]} == TOOL
    assert tool["description"] != TOOL["description"]
    arguments = json.loads(sent["reply"]["calls"][0]["arguments"])
    assert arguments.keys() == {"path", "deep", "names"}
    assert arguments["deep"] is False
    assert re.fullmatch(r"a/[a-z]{4}\.py", arguments["path"])


def test_names_of_machines_are_left_out_and_long_numbers_are_others():
    number = "7f3a09bc-11de-4a52"
    (sent,) = converted(request(f"It is {number}.", metadata={"user_id": number}))
    assert "metadata" not in sent["body"]
    assert number not in json.dumps(sent)


def test_different_texts_that_become_equal_are_an_error():
    words = ["".join(letters) for letters in product("abcdefghijkl", repeat=3)]
    with pytest.raises(ValueError, match="became equal"):
        converted(request(*words))


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.xz")), ids=lambda path: path.name)
def test_a_recorded_session_has_no_word_of_its_client(path: Path):
    recording = json.loads(lzma.decompress(path.read_bytes()))
    texts = json.dumps([each["body"] for each in recording["requests"]], ensure_ascii=False)
    assert not re.findall(r"[^\"/_](?:\b(?:the|you|Claude|Codex|opencode|and)\b)[^\"_-]", texts)
