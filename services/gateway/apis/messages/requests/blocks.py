"""Turns of blocks, as Anthropic's clients send them, as messages of a chat.

The calls of a turn go with its text and its thinking, results become messages of their own, and
consecutive turns of one role are one, as they are at Anthropic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Raw

from services.gateway.apis.messages.requests.schema import (
    Block,
    CacheControl,
    FileSource,
    Image,
    ImageSource,
    Markable,
    RedactedThinking,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    Turn,
    UrlSource,
)
from services.gateway.apis.messages.requests.signature import signed_text
from services.gateway.chat.media import IMAGE_URL, Media
from services.gateway.chat.requests.json_body import json_errors, plain
from services.gateway.chat.requests.json_list import (
    PartCount,
    check_values,
    is_text,
    items,
    typed,
)
from services.gateway.chat.requests.raw_json import NULL
from services.gateway.chat.requests.schema import MAX_MESSAGES
from services.gateway.chat.requests.unsupported import unsupported
from services.gateway.http.violations import show
from shared.errors import InvalidRequest
from shared.text.long_json import MAX_VALUES, encode_text
from shared.wire.messages import ModelInfo

MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

Message = dict[str, Any]

BILLING = "x-anthropic-billing-header"
"""The beginning of a line of Claude Code's: it differs in each request, so that nothing after it
would be found in the cache. Clients and proxies that join texts may put it anywhere."""
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""Around a client's system texts after the first. Many templates accept a system text only at the
front; a text put there would change the front with each turn, so that no cache would help."""
ERROR = "Error: {}"

FILE_ID = "file_id"
TEXT, IMAGE = {"text"}, {"image"}
KINDS_OF = {
    "user": {"text", "tool_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
    "system": TEXT,
}
KINDS = frozenset[str]().union(*KINDS_OF.values())
UNSUPPORTED = {
    "bash_code_execution_tool_result",
    "browser_state",
    "code_execution_tool_result",
    "compaction",
    "connector_text",
    "container_upload",
    "document",
    "image",
    "mcp_tool_result",
    "mcp_tool_use",
    "search_result",
    "server_tool_use",
    "text_editor_code_execution_tool_result",
    "tool_reference",
    "tool_search_tool_result",
    "web_fetch_tool_result",
    "web_search_tool_result",
}


@dataclass(frozen=True, slots=True)
class _Picture:
    """A ``part`` of a chat, from the block ``param``; ``source`` is the field with the image."""

    part: Message
    param: str
    source: str


class Conversation:
    """The messages of a request for ``model``. ``is_prefilled``: the model continues the last one.
    ``num_foreign`` counts thinking blocks of other models, which are left out. ``retention_s`` is
    the longest time in the cache that a part asks for. ``places`` are the client's names of parts
    with images, once there is a ``chat``."""

    def __init__(self, model: ModelInfo, media: Media) -> None:
        self._messages: list[Message] = []  # texts in pieces, possibly many, and images
        self.is_prefilled = False
        self.num_foreign = self.retention_s = 0
        self.places: dict[str, str] = {}
        self._model = model
        self._media = media
        self._more_kinds = IMAGE if IMAGE_URL in media.kinds else set[str]()
        self._calls: dict[str, str] = {}  # names by ids
        self._parts = PartCount("messages")

    def mark(self, asked: CacheControl | None) -> None:
        if asked is not None:
            self.retention_s = max(self.retention_s, asked.retention_s)

    @json_errors()
    def add_system(self, raw: Raw) -> None:
        """Raises InvalidRequest, as all others do."""
        if raw == NULL:
            return
        check_values(raw, "system", MAX_VALUES)
        try:
            system = msgspec.json.decode(raw, type=str | list[Raw])
        except msgspec.ValidationError:
            raise InvalidRequest(
                f"system is {show(plain(raw))}; expected str or array", param="system"
            ) from None
        self._say("system", [_system_text(self._blocks(system, "system", TEXT))])

    def add_turns(self, raw: Raw) -> None:
        turns = items(raw, "messages", MAX_MESSAGES, self._add_turn, max_values=MAX_VALUES)
        if self.is_prefilled and not (turns[-1] and "tool_calls" not in self._messages[-1]):
            param = f"messages[{len(turns) - 1}].content"
            raise InvalidRequest(
                f"{param} is to be continued, as the last message is the assistant's; expected one"
                " that ends in text and has no tool_use",
                param=param,
            )

    def chat(self) -> list[Message]:
        """The messages in the form of a chat template."""
        for index, message in enumerate(self._messages):
            for number, each in enumerate(_parts(message)):
                if isinstance(each, _Picture):
                    place = f"messages[{index}].content[{number}]"
                    self.places[place] = each.param
                    for field in (IMAGE_URL, FILE_ID):
                        self.places[f"{place}.{field}"] = each.source
        return [_joined(message) for message in self._messages]

    def _add_turn(self, index: int, raw: Raw) -> bool:
        """Whether the turn ends in text."""
        param = f"messages[{index}]"
        turn: Turn = typed(raw, Turn, param)
        if turn.role not in KINDS_OF:
            raise InvalidRequest(
                f"{param}.role is {show(turn.role)}; expected one of {', '.join(KINDS_OF)}",
                param=f"{param}.role",
            )
        param = f"{param}.content"
        kinds = KINDS_OF[turn.role] | (self._more_kinds if turn.role == "user" else set())
        blocks = self._blocks(turn.content, param, kinds)
        self.is_prefilled = turn.role == "assistant"
        match turn.role:
            case "user":
                self._add_user(blocks, param)
            case "assistant":
                self._add_assistant(blocks)
            case _:
                self._add_reminder(_system_text(blocks))
        return bool(blocks) and isinstance(blocks[-1], Text)

    def _add_reminder(self, text: str) -> None:
        if all(message["role"] == "system" for message in self._messages):
            self._say("system", [text])
        elif text:
            self._say("user", [REMINDER.format(text)])

    def _add_user(self, blocks: list[Block], param: str) -> None:
        if not blocks:
            raise InvalidRequest(f"{param} is []; expected array of length >= 1", param=param)
        has_text = False
        for number, block in enumerate(blocks):
            if not isinstance(block, ToolResult):
                has_text = True
                continue
            if has_text:
                raise InvalidRequest(
                    f"{param}[{number}] is a tool_result behind text; results come first",
                    param=f"{param}[{number}]",
                )
            self._add_result(block, f"{param}[{number}]")
        if has_text:
            self._say("user", self._pieces(blocks, param))

    def _add_result(self, result: ToolResult, param: str) -> None:
        if result.tool_use_id not in self._calls:
            where = f"{param}.tool_use_id"
            raise InvalidRequest(
                f"{where} is {show(result.tool_use_id)}; no tool_use before it has this id",
                param=where,
            )
        where = f"{param}.content"
        pieces = self._pieces(
            self._blocks(result.content or [], where, TEXT | self._more_kinds), where
        )
        if result.is_error:
            has_text = bool(pieces) and isinstance(pieces[0], str)
            pieces[:has_text] = [ERROR.format(pieces[0] if has_text else "")]
        self._messages.append(
            {
                "role": "tool",
                "tool_call_id": result.tool_use_id,
                "name": self._calls[result.tool_use_id],
                "content": pieces,
            }
        )

    def _add_assistant(self, blocks: list[Block]) -> None:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": []})
        message = self._messages[-1]
        for block in blocks:
            match block:
                case Text(text):
                    message["content"].append(text)
                case Thinking(thinking, signature):
                    self._add_thinking(message, thinking, signature)
                case ToolUse(call_id, name, arguments):
                    self._calls[call_id] = name
                    function = {"name": name, "arguments": arguments}
                    call = {"id": call_id, "type": "function", "function": function}
                    message.setdefault("tool_calls", []).append(call)
                case RedactedThinking():
                    self.num_foreign += 1

    def _add_thinking(self, message: Message, thinking: str, signature: str) -> None:
        text = signed_text(self._model.fingerprint, thinking, signature)
        if text is None:
            self.num_foreign += 1
        elif text:
            message.setdefault("reasoning_content", []).append(text)

    def _blocks(self, content: str | list[Raw], param: str, kinds: set[str]) -> list[Any]:
        """The blocks of a content, each of one of ``kinds``."""
        if isinstance(content, str):
            return [Text(content)]
        self._parts.add(len(content))
        blocks = [_block(each, f"{param}[{number}]", kinds) for number, each in enumerate(content)]
        for block in blocks:
            if isinstance(block, Markable):
                self.mark(block.cache_control)
        return blocks

    def _pieces(self, blocks: list[Any], param: str) -> list[str | _Picture]:
        """The texts and images of the content ``param``."""
        pieces: list[str | _Picture] = []
        for number, block in enumerate(blocks):
            match block:
                case Text(text) if text:
                    pieces.append(text)
                case Image(source):
                    pieces.append(self._picture(source, f"{param}[{number}]"))
        return pieces

    def _picture(self, raw: Raw, param: str) -> _Picture:
        self._media.check("image", param, self._model)
        where = f"{param}.source"
        source: ImageSource = typed(raw, ImageSource, where)
        match source:
            case UrlSource(url):
                _check_text(url, f"{where}.url")
                return _Picture({"type": IMAGE_URL, IMAGE_URL: url}, param, f"{where}.url")
            case FileSource(file_id):
                part = {"type": IMAGE_URL, FILE_ID: file_id}
                return _Picture(part, param, f"{where}.{FILE_ID}")
        if source.media_type not in MEDIA_TYPES:
            text = f"{where}.media_type is {show(source.media_type)}; expected one of "
            raise InvalidRequest(text + ", ".join(MEDIA_TYPES), param=f"{where}.media_type")
        _check_text(source.data, f"{where}.data")
        head = f'"data:{source.media_type};base64,'.encode()
        url = Raw(b"".join((head, memoryview(source.data)[1:])))
        return _Picture({"type": IMAGE_URL, IMAGE_URL: url}, param, f"{where}.data")

    def _say(self, role: str, pieces: Sequence[str | _Picture]) -> None:
        """Adds to the last message if it has the same role."""
        content = [piece for piece in pieces if piece]
        if self._messages and self._messages[-1]["role"] == role:
            self._messages[-1]["content"] += content
        elif content or role == "user":
            self._messages.append({"role": role, "content": content})


def _check_text(raw: Raw, param: str) -> None:
    if not is_text(raw):
        raise InvalidRequest(f"{param} is {show(raw)}; expected str", param=param)


class _AnyBlock(msgspec.Struct):
    type: Any = None


def _block(raw: Raw, param: str, kinds: set[str]) -> Block:
    try:
        kind = msgspec.json.decode(raw, type=_AnyBlock).type
    except msgspec.ValidationError:
        kind = None
    kind = kind if isinstance(kind, str) else None
    allowed = ", ".join(sorted(kinds))
    if kind in UNSUPPORTED - kinds:
        raise unsupported(f"{param}.type", kind, allowed)
    if kind in KINDS - kinds:
        raise InvalidRequest(
            f"{param}.type is {show(kind)}; expected {allowed} here", param=f"{param}.type"
        )
    block: Block = typed(raw, Block, param)
    return block


def _texts(blocks: list[Any]) -> str:
    """Texts, each on a line of its own."""
    return "\n".join(block.text for block in blocks if isinstance(block, Text) and block.text)


def _system_text(blocks: list[Any]) -> str:
    return _texts([Text(_without_billing(block.text)) for block in blocks])


def _without_billing(text: str) -> str:
    if BILLING not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.startswith(BILLING))


def _joined(message: Message) -> Message:
    parts = _parts(message)
    content: Any = [_part(each) for each in parts]
    if not any(isinstance(each, _Picture) for each in parts):
        content = encode_text("".join(parts))
    joined = message | {"content": content}
    if "reasoning_content" in message:
        joined["reasoning_content"] = "\n".join(message["reasoning_content"])
    return joined


def _parts(message: Message) -> list[Any]:
    """The texts between the images, and the images. A text of the assistant continues the one
    before; texts of others begin a line each."""
    separator = "" if message["role"] == "assistant" else "\n"
    parts: list[Any] = []
    for kind, pieces in groupby(message["content"], type):
        if kind is str:
            parts.append(separator.join(pieces))
        else:
            parts.extend(pieces)
    return parts


def _part(part: str | _Picture) -> Message:
    if isinstance(part, _Picture):
        return part.part
    return {"type": "text", "text": encode_text(part)}
