"""Items of a conversation as the messages of a chat. Pure."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from services.gateway.apis.responses.requests.input_items import INPUT_IMAGE
from services.gateway.apis.responses.requests.schema import ContentPart, Item
from services.gateway.chat.requests.json_list import typed
from shared.text.long_json import encode_text

INPUT = "input"
"""The only argument of the function that represents a custom tool."""

INSTRUCTING = ("system", "developer")

Decrypt = Callable[[str], str | None]


class ChatMessages(NamedTuple):
    """The JSON array of the messages. ``places`` are the client's names of contents with images."""

    json: Raw
    places: dict[str, str]


def chat_messages(
    instructions: str | None, items: Iterable[bytes], decrypt: Decrypt, num_before: int = 0
) -> ChatMessages:
    """``items`` are JSON; the first ``num_before`` are of earlier responses. ``decrypt`` returns
    the reasoning encrypted by us, or None."""
    messages, places = _Messages(decrypt), dict[str, str]()
    if instructions:
        messages.add({"role": "system", "content": instructions})
    for index, each in enumerate(items, -num_before):
        item: Item = typed(Raw(each), Item, "input")
        messages.add_item(item)
        if _has_image(item.content) or _has_image(item.output):
            field = "content" if item.type == "message" else "output"
            place = f"messages[{len(messages.all) - 1}].content"
            places[place] = f"input[{index}].{field}" if index >= 0 else "previous_response_id"
    encoded = msgspec.json.encode([_encoded(message) for message in messages.all])
    return ChatMessages(Raw(encoded), places)


def chat_name(namespace: str | None, name: str) -> str:
    """The name of a function in a chat, which has no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def _encoded(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return message | {"content": encode_text(content)} if isinstance(content, str) else message


class _Messages:
    """Consecutive reasoning, texts and calls of the assistant are one message, as they were one
    reply."""

    def __init__(self, decrypt: Decrypt) -> None:
        self.all: list[dict[str, Any]] = []
        self._decrypt = decrypt
        self._reply: dict[str, Any] | None = None  # the last message, if it is the assistant's

    def add(self, message: dict[str, Any]) -> None:
        """Instructions at the beginning are one message, unless they have images: many templates
        accept no second one."""
        is_first = len(self.all) == 1 and self.all[0]["role"] in INSTRUCTING
        if is_first and message["role"] in INSTRUCTING:
            texts = [_text(each["content"]) for each in (self.all[0], message)]
            if None not in texts:
                self.all[0]["content"] = "\n\n".join(filter(None, texts))
                return
        self.all.append(message)
        self._reply = message if message["role"] == "assistant" else None

    def add_item(self, item: Item) -> None:
        match item.type:
            case "message" if item.role == "assistant":
                self._reply_without("content", "tool_calls")["content"] = _content(item.content)
            case "message":
                self.add({"role": item.role, "content": _content(item.content)})
            case "reasoning":
                if reasoning := self._reasoning(item):
                    reply = self._reply_without("reasoning_content", "content", "tool_calls")
                    reply["reasoning_content"] = reasoning
            case "function_call":
                self._add_call(item, item.arguments or "")
            case "custom_tool_call":
                self._add_call(item, msgspec.json.encode({INPUT: item.input}).decode())
            case _:
                content = _content(item.output)
                self.add({"role": "tool", "tool_call_id": item.call_id, "content": content})

    def _reply_without(self, *fields: str) -> dict[str, Any]:
        """The unfinished message, or a new one if it already has one of ``fields``."""
        if self._reply is None or any(self._reply.get(field) for field in fields):
            self.add({"role": "assistant", "content": None})
        assert self._reply is not None
        return self._reply

    def _add_call(self, item: Item, arguments: str) -> None:
        name = chat_name(item.namespace, item.name or "")
        function = {"name": name, "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._reply_without().setdefault("tool_calls", []).append(call)

    def _reasoning(self, item: Item) -> str:
        if item.encrypted_content and (text := self._decrypt(item.encrypted_content)):
            return text
        content = item.content if isinstance(item.content, list) else []
        return _joined(content) or "\n\n".join(part.text or "" for part in item.summary or ())


def _content(content: str | list[ContentPart] | None) -> str | list[Any]:
    if not isinstance(content, list):
        return content or ""
    if len(content) <= 1 and not _has_image(content):
        return _joined(content)
    return [part if part.type == INPUT_IMAGE else _text_part(part) for part in content]


def _text_part(part: ContentPart) -> dict[str, str]:
    return {"type": "text", "text": part.text or part.refusal or ""}


def _has_image(content: str | list[ContentPart] | None) -> bool:
    return isinstance(content, list) and any(part.type == INPUT_IMAGE for part in content)


def _joined(parts: list[ContentPart]) -> str:
    return "".join(part.text or part.refusal or "" for part in parts)


def _text(content: str | list[Any]) -> str | None:
    """None of a content with images."""
    if isinstance(content, str):
        return content
    if any(isinstance(part, ContentPart) for part in content):
        return None
    return "".join(part["text"] for part in content)
