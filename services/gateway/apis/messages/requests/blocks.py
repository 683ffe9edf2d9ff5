"""Turns of blocks, as Anthropic's clients send them, as messages of a chat.

The calls of a turn go with its text and its thinking, results become messages of their own, and
consecutive turns of one role are one, as they are at Anthropic.
"""

from typing import Any

import msgspec
from msgspec import Raw

from services.gateway.apis.messages.requests.schema import (
    Block,
    RedactedThinking,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    Turn,
)
from services.gateway.apis.messages.requests.signature import signed_text
from services.gateway.chat.requests.json_body import json_errors, plain
from services.gateway.chat.requests.json_list import PartCount, check_values, items, typed
from services.gateway.chat.requests.raw_json import NULL
from services.gateway.chat.requests.schema import MAX_MESSAGES
from services.gateway.chat.requests.unsupported import unsupported
from services.gateway.http.violations import show
from shared.errors import InvalidRequest
from shared.text.long_json import MAX_VALUES, encode_text

Message = dict[str, Any]

BILLING = "x-anthropic-billing-header"
"""The beginning of a line of Claude Code's: it differs in each request, so that nothing after it
would be found in the cache. Clients and proxies that join texts may put it anywhere."""
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""Around a client's system texts after the first. Many templates accept a system text only at the
front; a text put there would change the front with each turn, so that no cache would help."""
ERROR = "Error: {}"

TEXT = {"text"}
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


class Conversation:
    """The messages of a request for the model ``fingerprint``. ``is_prefilled``: the model
    continues the last one. ``num_foreign`` counts thinking blocks of other models, which are left
    out."""

    def __init__(self, fingerprint: str) -> None:
        self._messages: list[Message] = []  # texts in pieces, possibly many
        self.is_prefilled = False
        self.num_foreign = 0
        self._fingerprint = fingerprint
        self._calls: dict[str, str] = {}  # names by ids
        self._parts = PartCount("messages")

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
        self._say("system", _system_text(self._blocks(system, "system", TEXT)))

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
        blocks = self._blocks(turn.content, param, KINDS_OF[turn.role])
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
            self._say("system", text)
        elif text:
            self._say("user", REMINDER.format(text))

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
            self._say("user", _texts(blocks))

    def _add_result(self, result: ToolResult, param: str) -> None:
        if result.tool_use_id not in self._calls:
            where = f"{param}.tool_use_id"
            raise InvalidRequest(
                f"{where} is {show(result.tool_use_id)}; no tool_use before it has this id",
                param=where,
            )
        text = _texts(self._blocks(result.content or [], f"{param}.content", TEXT))
        self._messages.append(
            {
                "role": "tool",
                "tool_call_id": result.tool_use_id,
                "name": self._calls[result.tool_use_id],
                "content": [ERROR.format(text) if result.is_error else text],
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
        text = signed_text(self._fingerprint, thinking, signature)
        if text is None:
            self.num_foreign += 1
        elif text:
            message.setdefault("reasoning_content", []).append(text)

    def _blocks(self, content: str | list[Raw], param: str, kinds: set[str]) -> list[Any]:
        """The blocks of a content, each of one of ``kinds``."""
        if isinstance(content, str):
            return [Text(content)]
        self._parts.add(len(content))
        return [_block(each, f"{param}[{number}]", kinds) for number, each in enumerate(content)]

    def _say(self, role: str, text: str) -> None:
        """Adds to the last message if it has the same role."""
        texts = [text] if text else []
        if self._messages and self._messages[-1]["role"] == role:
            self._messages[-1]["content"] += texts
        elif text or role == "user":
            self._messages.append({"role": role, "content": texts})


class _AnyBlock(msgspec.Struct):
    type: Any = None


def _block(raw: Raw, param: str, kinds: set[str]) -> Block:
    try:
        kind = msgspec.json.decode(raw, type=_AnyBlock).type
    except msgspec.ValidationError:
        kind = None
    kind = kind if isinstance(kind, str) else None
    allowed = ", ".join(sorted(kinds))
    if kind in UNSUPPORTED:
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
    """A text of the assistant continues the one before; texts of others begin a line each."""
    separator = "" if message["role"] == "assistant" else "\n"
    joined = message | {"content": encode_text(separator.join(message["content"]))}
    if "reasoning_content" in message:
        joined["reasoning_content"] = "\n".join(message["reasoning_content"])
    return joined
