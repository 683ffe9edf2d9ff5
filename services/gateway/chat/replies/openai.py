"""OpenAI's reply objects, field for field in OpenAI's order; fields added by vLLM come last."""

from typing import NamedTuple

from msgspec import UNSET, Raw, Struct, UnsetType

TokenIds = list[int] | UnsetType
StopReason = int | str | UnsetType | None
Offsets = Raw | UnsetType | None


class ShownPrompt(NamedTuple):
    """A prompt in a reply: its ids, its text, and the positions of its tokens in the text."""

    token_ids: TokenIds = UNSET
    text: str | UnsetType = UNSET
    offsets: Offsets = UNSET


NOTHING_SHOWN = ShownPrompt()


class PromptTokensDetails(Struct):
    """The dropped part of a chat is not counted in the tokens of the prompt."""

    cached_tokens: int
    dropped_tokens: int | UnsetType = UNSET
    dropped_turns: int | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """Counts accepted and rejected drafts among the verified ones, if there were any, and the
    tokens of reasoning, if they are known."""

    accepted_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class FunctionDelta(Struct, omit_defaults=True):
    """The ``name`` comes once; ``arguments`` are the next piece of their JSON."""

    arguments: str
    name: str | None = None


class CallDelta(Struct, omit_defaults=True):
    """``id`` and ``type`` come once."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None
    function_call: FunctionDelta | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class CalledFunction(Struct):
    name: str
    arguments: str


class Call(Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(Struct):
    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[Call] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET


class ChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: Raw | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = UNSET
    token_ids: TokenIds = UNSET
    draft_logprobs: Raw | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: Raw | None
    finish_reason: str | None
    stop_reason: StopReason
    token_ids: TokenIds
    draft_logprobs: Raw | UnsetType


class TextChoice(Struct):
    index: int
    text: str
    logprobs: Raw | None
    finish_reason: str | None
    stop_reason: StopReason
    token_ids: TokenIds
    prompt_token_ids: TokenIds
    draft_logprobs: Raw | UnsetType
    prompt_logprobs: Raw | UnsetType = UNSET
    token_offsets: Offsets = UNSET


Choice = ChunkChoice | ChatChoice | TextChoice


class Completion(Struct):
    """A reply, or one chunk of a streamed one; a chunk has a usage only if the client asked."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: TokenIds = UNSET
    prompt_text: str | UnsetType = UNSET
    token_offsets: Offsets = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET


class PooledModel(Struct):
    """The output of a model that pools: ``embed`` with vectors of ``size``, or ``classify``."""

    task: str
    size: int
    is_matryoshka: bool
    dimensions: list[int]
    labels: list[str]


class ModelTraits(Struct):
    """The formats in which the model calls tools and reasons; empty: it does not. A model that
    writes texts has no ``pooling``."""

    tool_parser: str
    reasoning_parser: str
    pooling: PooledModel | UnsetType = UNSET


class Model(Struct):
    """``max_model_len`` is in tokens; the field is vLLM's, and so are ``root`` and ``parent``, of
    variants of the model ``parent``. ``input_modalities`` is OpenRouter's; absent: texts alone."""

    id: str
    created: int
    max_model_len: int
    shoal: ModelTraits
    object: str = "model"
    owned_by: str = "shoal"
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    input_modalities: list[str] | UnsetType = UNSET


class ModelList(Struct):
    data: list[Model]
    object: str = "list"
