"""Checks the events of a streamed message and puts them together."""

import json
from typing import Any

DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
STOP_REASONS = {
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "model_context_window_exceeded",
}
USAGE = {"input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens"}
PING = {"type": "ping"}


class StreamFailed(Exception):
    """The stream has ended with an error, which is the argument."""


def read_message(stream: str) -> dict[str, Any]:
    """The client's final message. Asserts that each event is allowed in its place."""
    checker = EventChecker()
    *blocks, rest = stream.split("\n\n")
    assert rest == "", rest
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        checker.add(event)
    return checker.end()


class EventChecker:
    """Takes the events of one stream, in order."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self._open: dict[str, Any] | None = None
        self._json = ""
        self._cut = -1  # the block with an incomplete input
        self._has_end = self._is_over = False
        self._prompt_tokens = 0
        self.num_pings = 0

    def add(self, event: dict[str, Any]) -> None:
        assert not self._is_over, event
        match event["type"]:
            case "ping":
                assert event == PING
                assert self.message, "a ping comes after the start"
                self.num_pings += 1
            case "message_start":
                self._start(event)
            case "error":
                self._is_over = True
                raise StreamFailed(event)
            case _:
                assert self.message, event
                getattr(self, f"_{event['type']}")(event)

    def end(self) -> dict[str, Any]:
        assert self._is_over
        content, reason = self.message["content"], self.message["stop_reason"]
        has_call = any(block["type"] == "tool_use" for block in content)
        assert reason != "tool_use" or has_call
        assert self._cut < 0 or (reason != "tool_use" and self._cut == len(content) - 1)
        return self.message

    def _start(self, event: dict[str, Any]) -> None:
        assert event.keys() == {"type", "message"}
        assert not self.message
        self.message = event["message"]
        assert self.message["id"].startswith("msg_")
        assert self.message["type"] == "message"
        assert self.message["role"] == "assistant"
        assert self.message["model"]
        assert self.message["content"] == []
        assert self.message["stop_reason"] is None
        assert self.message["stop_sequence"] is None
        self._check_usage(self.message["usage"])
        assert self.message["usage"]["output_tokens"] == 0
        self._prompt_tokens = self._num_prompt(self.message["usage"])

    def _content_block_start(self, event: dict[str, Any]) -> None:
        assert event.keys() == {"type", "index", "content_block"}
        assert self._open is None
        assert not self._has_end
        content = self.message["content"]
        assert event["index"] == len(content)
        self._open, self._json = event["content_block"], ""
        empty = EMPTY[self._open["type"]]
        assert {name: self._open[name] for name in empty} == empty
        if self._open["type"] == "tool_use":
            assert self._open["id"]
            assert self._open["name"]
            assert self._open["id"] not in {block.get("id") for block in content}
        content.append(self._open)

    def _content_block_delta(self, event: dict[str, Any]) -> None:
        assert event.keys() == {"type", "index", "delta"}
        assert self._open is not None
        assert event["index"] == len(self.message["content"]) - 1
        kind = event["delta"]["type"]
        field = DELTAS[self._open["type"]][kind]
        assert event["delta"].keys() == {"type", field}
        text = event["delta"][field]
        assert text, "no delta is empty"
        assert not self._open.get("signature"), "a signature ends its block"
        if kind == "input_json_delta":
            self._json += text
        else:
            self._open[field] += text

    def _content_block_stop(self, event: dict[str, Any]) -> None:
        assert event.keys() == {"type", "index"}
        assert self._open is not None
        assert event["index"] == len(self.message["content"]) - 1
        assert self._open.get("signature", "a signature")
        if self._open["type"] == "tool_use":
            self._close_call(self._open)
        self._open = None

    def _close_call(self, call: dict[str, Any]) -> None:
        try:
            call["input"] = json.loads(self._json)
        except ValueError:
            self._cut = len(self.message["content"]) - 1
        assert isinstance(call["input"], dict)

    def _message_delta(self, event: dict[str, Any]) -> None:
        assert event.keys() == {"type", "delta", "usage"}
        assert self._open is None
        assert not self._has_end
        self._has_end = True
        assert event["delta"].keys() == {"stop_reason", "stop_sequence"}
        assert event["delta"]["stop_reason"] in STOP_REASONS
        is_sequence = event["delta"]["stop_reason"] == "stop_sequence"
        assert is_sequence == (event["delta"]["stop_sequence"] is not None)
        self._check_usage(event["usage"])
        assert self._num_prompt(event["usage"]) == self._prompt_tokens
        self.message |= event["delta"]
        self.message["usage"] = event["usage"]

    def _message_stop(self, event: dict[str, Any]) -> None:
        assert event.keys() == {"type"}
        assert self._has_end
        self._is_over = True

    def _num_prompt(self, usage: dict[str, Any]) -> int:
        return sum(usage[name] for name in USAGE - {"output_tokens"})

    def _check_usage(self, usage: dict[str, Any]) -> None:
        assert usage.keys() - {"output_tokens_details", "cache_creation"} == USAGE
        assert all(isinstance(usage[name], int) and usage[name] >= 0 for name in USAGE)
        thought = usage.get("output_tokens_details", {"thinking_tokens": 0})["thinking_tokens"]
        assert 0 <= thought <= usage["output_tokens"]
