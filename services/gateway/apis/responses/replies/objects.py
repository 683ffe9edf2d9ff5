"""The objects of a reply of ``/v1/responses``, field for field as OpenAI has them."""

from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

NO_LIST = Raw(b"[]")


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: Raw = NO_LIST
    logprobs: Raw = NO_LIST


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    status: ItemStatus
    encrypted_content: str | UnsetType = UNSET


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: str = "assistant"


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class CustomCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomCallItem


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    dropped_tokens: int | UnsetType = UNSET
    dropped_turns: int | UnsetType = UNSET


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    """``repetition`` is ours: OpenAI has no reason for this end of a text."""

    reason: Literal["max_output_tokens", "repetition"]


class ReasoningShown(Struct):
    effort: str | None
    summary: str | None


class TextShown(Struct):
    format: Any
    verbosity: str = "medium"


class ResponseObject(Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: Status
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningShown
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextShown
    tool_choice: Any
    tools: Raw
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
