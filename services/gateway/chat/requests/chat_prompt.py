"""The messages of a chat as a Prompt for the mesh."""

import msgspec
import numpy as np
from msgspec import Raw

from services.gateway.chat.media import Media
from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.json_list import PartCount, is_text, items, other_fields, typed
from services.gateway.chat.requests.schema import (
    MAX_MESSAGES,
    ChatRequest,
    Content,
    ContentPart,
    InputMessage,
)
from services.gateway.chat.requests.unsupported import unsupported
from services.gateway.http.violations import show
from services.gateway.mesh.job import Attachment, Prompt
from shared.errors import InvalidRequest
from shared.text.long_json import MAX_VALUES, check_utf8
from shared.wire.messages import ModelInfo

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def chat_prompt(request: ChatRequest, media: Media, model: ModelInfo) -> Prompt:
    """The messages as the client sent them, except that files are apart: a part with one becomes
    ``{"type": "image", "media": 0}``, with its number. Raises InvalidRequest."""
    messages, chat = request.messages, _Chat(media, model)
    items(messages, "messages", MAX_MESSAGES, chat.add, max_values=MAX_VALUES)
    _check_utf8(messages)
    options = media.options(request.mm_processor_kwargs, bool(chat.files))
    data = np.frombuffer(chat.written(messages), dtype=np.uint8)
    return Prompt("chat", data, chat.files, options)


class _Chat:
    """Checks the messages one by one; ``files`` are those found so far."""

    def __init__(self, media: Media, model: ModelInfo) -> None:
        self.files: list[Attachment] = []
        self._media = media
        self._model = model
        self._parts = PartCount("messages")
        self._changed: dict[int, Raw] = {}  # messages without their files, by number

    def written(self, messages: Raw) -> bytes:
        if not self._changed:
            return bytes(messages)
        written = items(
            messages,
            "messages",
            MAX_MESSAGES,
            lambda index, message: memoryview(self._changed.get(index, message)),
        )
        return b"[%b]" % b",".join(written)

    def add(self, index: int, raw: Raw) -> None:
        param = f"messages[{index}]"
        message: InputMessage = typed(raw, InputMessage, param)
        if message.role not in ROLES:
            raise InvalidRequest(
                f"{param}.role is {show(message.role)}; expected one of {', '.join(ROLES)}",
                param=f"{param}.role",
            )
        self._parts.add(len(message.tool_calls or ()))
        for number, call in enumerate(message.tool_calls or ()):
            if call.function is None and call.custom is None:
                field = f"{param}.tool_calls[{number}].function"
                raise InvalidRequest(f"{field} is required", param=field)
        if (content := self._content(message, f"{param}.content")) is not None:
            fields = other_fields(raw, "content") | {"content": content}
            self._changed[index] = Raw(msgspec.json.encode(fields))

    def _content(self, message: InputMessage, param: str) -> Raw | None:
        """The content without its files; None if it has none."""
        if is_text(message.content):
            return None
        content: Content = typed(message.content, Content, param)
        has_others = message.tool_calls or message.function_call or message.reasoning
        has_others = has_others or message.reasoning_content or message.refusal
        if content is None and not has_others:
            raise InvalidRequest(f"{param} is required", param=param)
        if not isinstance(content, list):
            return None
        self._parts.add(len(content))
        has_files = [part.type in self._media.kinds for part in content]
        for number, part in enumerate(content):
            if not has_files[number]:
                _check_part(part, f"{param}[{number}]")
        if not any(has_files):
            return None

        def take(number: int, part: Raw) -> bytes | memoryview:
            if not has_files[number]:
                return memoryview(part)
            return self._take(part, f"{param}[{number}]", message.role)

        parts = items(message.content, param, len(content), take)
        return Raw(b"[%b]" % b",".join(parts))

    def _take(self, part: Raw, param: str, role: str) -> bytes:
        number = len(self.files)
        file = self._media.attachment(part, param, role, self.files, self._model)
        self.files.append(file)
        return msgspec.json.encode({"type": file.medium.kind, "media": number})


@json_errors()
def _check_utf8(raw: Raw) -> None:
    """Texts have been passed over."""
    check_utf8(memoryview(raw))


def _check_part(part: ContentPart, param: str) -> None:
    if part.type not in ("text", "refusal"):
        raise unsupported(f"{param}.type", part.type, show("text"))
    if getattr(part, part.type) is None:
        field = f"{param}.{part.type}"
        raise InvalidRequest(f"{field} is required", param=field)
