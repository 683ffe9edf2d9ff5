"""The objects of Anthropic's Messages API, field for field in Anthropic's order."""

from msgspec import UNSET, Raw, Struct, UnsetType


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(Struct):
    thinking_tokens: int


class CacheCreation(Struct):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class Usage(Struct):
    """``input_tokens`` are the computed ones. If a part of the prompt had ``cache_control``, all of
    them but the last one, which no request finds in the cache, are
    ``cache_creation_input_tokens``. The three counts add up to the prompt. ``dropped_tokens`` and
    ``dropped_turns``, our own fields, count the part of a chat left out of the prompt."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation | UnsetType = UNSET
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET
    dropped_tokens: int | UnsetType = UNSET
    dropped_turns: int | UnsetType = UNSET


class Message(Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    role: str = "assistant"


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockDeltaEvent(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Struct):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """``usage`` is that of the whole message."""

    delta: MessageEnd
    usage: Usage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class Ping(Struct, tag_field="type", tag="ping"):
    pass


BlockEvent = BlockStart | BlockDeltaEvent | BlockStop


class TokenCount(Struct):
    input_tokens: int


class Error(Struct):
    type: str
    message: str


class ErrorReply(Struct, tag_field="type", tag="error"):
    error: Error
    request_id: str


class Model(Struct, tag_field="type", tag="model"):
    """``created_at`` as RFC 3339 has it; the numbers are of tokens."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class ModelList(Struct):
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool = False
