"""The body of a request, with limits; null means the default."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from services.gateway.chat.requests.format_schema import FormatFields
from services.gateway.chat.requests.raw_json import NULL
from services.gateway.chat.requests.tool_schema import FunctionChoice, ToolChoiceField
from services.gateway.http.request_id import PATTERN
from shared.wire.envelope import PromiseMs, RetentionS
from shared.wire.messages import (
    MAX_BAD_WORDS,
    MAX_LOGPROB_IDS,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    MAX_PRIORITY,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
)

MAX_INT32 = 2**31 - 1
MAX_BAD_WORD_CHARS = 100
MAX_ALLOWED_IDS = 1024
MAX_BIASES = 1024
MAX_SALT_CHARS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 1 << 14  # of all messages of a request; calls and blocks are parts too
MAX_FIELDS = 256

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_INT32)]
MinTokens = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Budget = Annotated[int, Meta(ge=-1, le=MAX_INT32)]  # -1: without a limit
NumChoices = Annotated[int, Meta(ge=1, le=MAX_INT32)]
NumLogprobs = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
CacheRetention = Literal["in_memory", "in-memory", "24h"]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopList = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)]
RequestId = Annotated[str, Meta(pattern=PATTERN)]

NumPromptTokens = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
TruncationSide = Literal["left", "right"]
ChatTemplate = Annotated[str, Meta(min_length=1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """``continuous_usage_stats``: every chunk has the usage up to it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CustomParams(Struct, forbid_unknown_fields=True):
    """The parameters of SGLang's custom logit processors."""

    thinking_budget: MinTokens | None = None


class RepetitionDetection(Struct, forbid_unknown_fields=True):
    """A ``max_pattern_size`` of 0 is off."""

    max_pattern_size: Annotated[int, Meta(ge=0, le=MAX_PATTERN_SIZE)] = 0
    min_pattern_size: Annotated[int, Meta(ge=0, le=MAX_PATTERN_SIZE)] = 0
    min_count: Annotated[int, Meta(ge=0, le=MAX_PATTERN_COUNT)] = 0


class Slo(Struct, forbid_unknown_fields=True):
    """The times that the client is promised; fields as in Promise."""

    ttft_ms: PromiseMs | None = None
    tpot_ms: PromiseMs | None = None


class GenerationRequest(FormatFields, kw_only=True):
    """The fields shared by both endpoints. ``lora_path`` is SGLang's name of a variant of the
    model."""

    model: str | None = None
    lora_path: str | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_IDS)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    bad_words_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_BAD_WORDS)] | None = None
    seed: Seed | None = None
    n: NumChoices | None = None
    max_tokens: NumTokens | None = None
    min_tokens: MinTokens | None = None
    stop: StopString | StopList | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_offsets: bool | None = None
    stream_interval: NumTokens | None = None
    max_streaming_response_tokens: NumTokens | None = None
    truncate_prompt_tokens: NumPromptTokens | None = None
    truncation_side: TruncationSide | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_IDS)] | None = None
    include_draft_logprobs: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    cache_ttl: RetentionS | None = None
    prompt_cache_retention: CacheRetention | None = None
    slo: Slo | None = None
    request_id: RequestId | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: Budget | None = None
    reasoning_max_tokens: MinTokens | None = None
    custom_params: CustomParams | None = None


class ContentPart(Struct):
    """A piece of a message's content: a ``text``, or a ``refusal``, which is a text too."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[ContentPart] | None


class PastFunction(Struct):
    name: str
    arguments: str | dict[str, Raw] | None = None


class PastCustom(Struct):
    name: str
    input: str


class PastCall(Struct):
    """A call of a ``function``, or of a ``custom`` tool with a text as its input."""

    function: PastFunction | None = None
    custom: PastCustom | None = None


class InputMessage(Struct):
    """The keys we read, ``content`` as Content; the chat template sees all others too, which stay
    the JSON they are."""

    role: str
    content: Raw = NULL
    refusal: str | None = None
    tool_calls: list[PastCall] | None = None
    function_call: PastFunction | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """``echo``: the reply begins with the text of a last message from the assistant.
    ``separate_reasoning`` false: the reasoning is part of the content."""

    messages: Raw
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Raw = NULL
    documents: Raw = NULL
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: Raw = NULL
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    functions: Raw = NULL
    function_call: FunctionChoice | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    echo: bool | None = None
    return_prompt_text: bool | None = None
    history_limit: NumPromptTokens | None = None
    mm_processor_kwargs: Raw = NULL


class CompletionRequest(GenerationRequest, kw_only=True):
    """``max_tokens`` 0 computes the prompt alone, for its logprobs. ``logprobs_by_token_id``: the
    logprobs are in the form of ``prompt_logprobs``, exact for tokens with the same text."""

    prompt: Raw
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    logprobs_by_token_id: bool | None = None
