"""Replies as streams of events in the three formats of the clients."""

import json
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from benchmarks.agents.steps import Call

Event = dict[str, Any]
MODEL = "shoal-tiny"
SIGNATURE = "signature of "
"""Before a thought: the fake proof of a model's own reasoning."""

_numbers = count(1)


def new_id(prefix: str) -> str:
    return f"{prefix}{next(_numbers):024d}"


def messages_stream(thought: str, text: str, calls: list[Call]) -> Iterator[Event]:
    """Anthropic's messages."""
    usage = {"input_tokens": 100, "output_tokens": 10}
    message = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": MODEL}
    fields: Event = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": message | fields}
    for index, (block, deltas) in enumerate(_blocks(thought, text, calls)):
        yield {"type": "content_block_start", "index": index, "content_block": block}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    reason = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": reason, "usage": usage}
    yield {"type": "message_stop"}


def _blocks(thought: str, text: str, calls: list[Call]) -> Iterator[tuple[Event, list[Event]]]:
    if thought:
        yield (
            {"type": "thinking", "thinking": "", "signature": ""},
            [
                {"type": "thinking_delta", "thinking": thought},
                {"type": "signature_delta", "signature": SIGNATURE + thought},
            ],
        )
    if text:
        yield {"type": "text", "text": ""}, [{"type": "text_delta", "text": text}]
    for call in calls:
        yield (
            {"type": "tool_use", "id": new_id("toolu_"), "name": call[0], "input": {}},
            [{"type": "input_json_delta", "partial_json": call[1]}],
        )


def responses_stream(thought: str, text: str, calls: list[Call]) -> Iterator[Event]:
    """OpenAI's responses."""
    response = {"id": new_id("resp_"), "object": "response", "model": MODEL, "output": []}
    yield {"type": "response.created", "response": response | {"status": "in_progress"}}
    items = list(_items(thought, text, calls))
    for index, item in enumerate(items):
        for kind in ("added", "done"):
            yield {"type": f"response.output_item.{kind}", "output_index": index, "item": item}
    usage = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
    end = {"status": "completed", "output": items, "usage": usage}
    yield {"type": "response.completed", "response": response | end}


def _items(thought: str, text: str, calls: list[Call]) -> Iterator[Event]:
    if thought:
        yield {
            "type": "reasoning",
            "id": new_id("rs_"),
            "summary": [{"type": "summary_text", "text": thought}],
            "encrypted_content": SIGNATURE + thought,
        }
    if text:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        head = {"type": "message", "id": new_id("msg_"), "status": "completed"}
        yield head | {"role": "assistant", "content": content}
    for call in calls:
        head = {"type": "function_call", "id": new_id("fc_"), "call_id": new_id("call_")}
        yield head | {"name": call[0], "arguments": call[1], "status": "completed"}


def chat_stream(thought: str, text: str, calls: list[Call]) -> Iterator[Event]:
    """Chunks of chat completions."""
    head = {"id": new_id("chatcmpl-"), "object": "chat.completion.chunk", "created": 1}

    def chunk(delta: Event, reason: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return head | {"model": MODEL, "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    if thought:
        yield chunk({"reasoning_content": thought})
    if text:
        yield chunk({"content": text})
    for index, call in enumerate(calls):
        function = {"name": call[0], "arguments": call[1]}
        head_of_call = {"index": index, "id": new_id("call_"), "type": "function"}
        yield chunk({"tool_calls": [head_of_call | {"function": function}]})
    yield chunk({}, "tool_calls" if calls else "stop")
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    yield head | {"model": MODEL, "choices": [], "usage": usage}


def sse(events: Iterable[Event]) -> bytes:
    """Events with their names, which clients of chats ignore."""
    lines = []
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        lines.append(f"{name}data: {json.dumps(event)}\n\n")
    return "".join(lines).encode()
