"""OpenAI's reply objects, field for field in OpenAI's order."""

from msgspec import UNSET, Struct, UnsetType


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatMessage(Struct):
    role: str
    content: str
    refusal: None = None


class ChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: str | None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: str | None


class TextChoice(Struct):
    index: int
    text: str
    logprobs: None
    finish_reason: str | None


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


class Model(Struct):
    """``max_model_len`` in tokens, as vLLM tells it."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "shoal"


class ModelList(Struct):
    data: list[Model]
    object: str = "list"


class Error(Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct):
    error: Error
