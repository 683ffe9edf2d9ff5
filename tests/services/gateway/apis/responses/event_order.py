"""Valid events of a streamed response, from any producer.

The events themselves add up to the response, so readers need nothing else.
"""

import json
from typing import Any

ENDS = {"response.completed", "response.incomplete", "response.failed"}
PARTS = {"reasoning_summary_part": "summary", "content_part": "content"}
TEXTS = {
    "output_text": "text",
    "reasoning_text": "text",
    "reasoning_summary_text": "text",
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
}
"""The kinds of deltas, and the field that holds their sum."""


def parsed_events(data: str) -> list[dict[str, Any]]:
    """The events of a stream, each named twice."""
    events = []
    blocks = [block for block in data.split("\n\n") if block and not block.startswith(":")]
    for block in blocks:
        name, content = block.split("\n")
        event = json.loads(content.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response of ``events``."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *middle, end = events
    assert created["type"] == "response.created"
    assert in_progress["type"] == "response.in_progress"
    assert end["type"] in ENDS
    for event in (created, in_progress):
        assert event["response"]["status"] == "in_progress"
        assert event["response"]["output"] == []
        assert event["response"]["usage"] is None
    response: dict[str, Any] = end["response"]
    assert response["id"] == created["response"]["id"]
    items = _items_of(middle, is_failed=end["type"] == "response.failed")
    assert response["output"][: len(items)] == items
    if end["type"] != "response.failed":
        assert response["output"] == items
        assert response["usage"]["total_tokens"] == (
            response["usage"]["input_tokens"] + response["usage"]["output_tokens"]
        )
    if end["type"] == "response.completed":
        assert response["status"] == "completed"
        assert all(item["status"] == "completed" for item in items[:-1])
    elif end["type"] == "response.incomplete":
        assert response["status"] in ("incomplete", "cancelled")
    return response


def _items_of(events: list[dict[str, Any]], is_failed: bool) -> list[dict[str, Any]]:
    """Items follow one another; a failed stream may end within one."""
    items: list[dict[str, Any]] = []
    while events:
        added, *events = events
        assert added["type"] == "response.output_item.added"
        assert added["output_index"] == len(items)
        assert added["item"]["status"] == "in_progress"
        own = []
        while events and events[0]["type"] != "response.output_item.done":
            own.append(events.pop(0))
        for event in own:
            assert event["output_index"] == len(items)
            assert event["item_id"] == added["item"]["id"]
        if not events:
            assert is_failed
            return items
        done = events.pop(0)
        assert done["output_index"] == len(items)
        item = done["item"]
        _check_item(added["item"], own, item)
        items.append(item)
    assert len({item["id"] for item in items}) == len(items)
    return items


def _check_item(begun: dict[str, Any], events: list[dict[str, Any]], item: dict[str, Any]) -> None:
    for name in ("id", "type", "call_id", "name", "namespace", "role"):
        assert begun.get(name) == item.get(name)
    if item["type"] in ("function_call", "custom_tool_call"):
        field = "arguments" if item["type"] == "function_call" else "input"
        assert begun[field] == ""
        assert _text_of(events) == item[field]
        return
    name = "summary" if item.get("summary") else "content"
    assert begun[name] == []
    [part] = item[name]
    added, *texts, done = events
    kind = added["type"].removeprefix("response.").removesuffix(".added")
    assert PARTS[kind] == name
    assert done["type"] == f"response.{kind}.done"
    assert done["part"] == part
    assert added["part"]["text"] == ""
    assert added["part"]["type"] == part["type"]
    assert _text_of(texts) == part["text"]
    if part["type"] == "output_text":
        *deltas, whole = texts
        assert [each for delta in deltas for each in delta["logprobs"]] == part["logprobs"]
        assert whole["logprobs"] == part["logprobs"]


def _text_of(events: list[dict[str, Any]]) -> str:
    *deltas, done = events
    kind = done["type"].removeprefix("response.").removesuffix(".done")
    assert {delta["type"] for delta in deltas} <= {f"response.{kind}.delta"}
    assert all(delta["delta"] for delta in deltas)
    text: str = done[TEXTS[kind]]
    assert "".join(delta["delta"] for delta in deltas) == text
    return text
