"""The body of a request to Anthropic's Messages API; null means the default."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from services.gateway.chat.requests.raw_json import NULL
from services.gateway.chat.requests.schema import MAX_INT32, Slo, StopList
from services.gateway.chat.requests.tool_schema import ToolName
from shared.wire.messages import MAX_NAME_CHARS

CallId = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Temperature = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=0, le=MAX_INT32)]
MaxTokens = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Budget = Annotated[int, Meta(ge=1, le=MAX_INT32)]
Display = Literal["summarized", "omitted", "updates", "highlights"]


class CacheControl(Struct, tag_field="type", tag="ephemeral"):
    ttl: Literal["5m", "1h"] | None = None

    @property
    def retention_s(self) -> int:
        return 3600 if self.ttl == "1h" else 300


class Markable(Struct, kw_only=True):
    """A part of a prompt, up to which the client may ask for a place in the cache."""

    cache_control: CacheControl | None = None


class Text(Markable, tag_field="type", tag="text"):
    text: str


class Image(Markable, tag_field="type", tag="image"):
    """Its ``source`` is an ImageSource."""

    source: Raw


class Base64Source(Struct, tag_field="type", tag="base64"):
    """``data`` is a text, possibly a long one."""

    media_type: str
    data: Raw


class UrlSource(Struct, tag_field="type", tag="url"):
    url: Raw


class FileSource(Struct, tag_field="type", tag="file"):
    file_id: Raw


ImageSource = Base64Source | UrlSource | FileSource


class Thinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class RedactedThinking(Struct, tag_field="type", tag="redacted_thinking"):
    data: str


class ToolUse(Markable, tag_field="type", tag="tool_use"):
    id: CallId
    name: ToolName
    input: dict[str, Raw]


class ToolResult(Markable, tag_field="type", tag="tool_result"):
    tool_use_id: CallId
    content: str | list[Raw] | None = None
    is_error: bool | None = None


Block = Text | Image | Thinking | RedactedThinking | ToolUse | ToolResult


class Turn(Struct):
    """One of ``messages``; a list is of blocks."""

    role: str
    content: str | list[Raw]


class Tool(Markable):
    """``type`` null or ``custom``: its client runs it. ``input_schema`` is a JSON schema."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class AutoChoice(Struct, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(Struct, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none"):
    pass


class EnabledThinking(Struct, tag_field="type", tag="enabled"):
    budget_tokens: Budget
    display: Display | None = None


class AdaptiveThinking(Struct, tag_field="type", tag="adaptive"):
    display: Display | None = None


class DisabledThinking(Struct, tag_field="type", tag="disabled"):
    pass


class JsonFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ClearThinking(Struct, tag_field="type", tag="clear_thinking_20251015"):
    keep: Any = None


class ClearToolUses(Struct, tag_field="type", tag="clear_tool_uses_20250919"):
    pass


class ContextManagement(Struct):
    edits: list[ClearThinking | ClearToolUses] | None = None


class Metadata(Struct):
    user_id: str | None = None


class PromptRequest(Struct, kw_only=True):
    """A body of ``/v1/messages/count_tokens``: the fields of the prompt. ``diagnostics``,
    ``user_profile_id`` and ``metadata`` have no effect."""

    messages: Raw
    model: str | None = None
    system: Raw = NULL
    tools: Raw = NULL
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: EnabledThinking | AdaptiveThinking | DisabledThinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    diagnostics: Raw = NULL
    user_profile_id: Raw = NULL


class MessagesRequest(PromptRequest, kw_only=True):
    """A body of ``/v1/messages``. ``max_tokens`` 0 computes the prompt alone, into the cache."""

    max_tokens: MaxTokens
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: StopList | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    slo: Slo | None = None
