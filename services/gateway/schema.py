"""What clients may send, with the limits; null means the default."""

from typing import Annotated

from msgspec import Meta, Struct

MAX_INT32 = 2**31 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopList = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    """What both endpoints have in common. ``top_k`` −1 and 0 are off."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stop: StopString | StopList | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Part(Struct):
    """A piece of a message's content; only those of type text are built."""

    type: str
    text: str | None = None


class ChatMessage(Struct):
    """The keys we read; the chat template sees all others too."""

    role: str
    content: str | list[Part] | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Annotated[str, Meta(min_length=1)] | Annotated[list[TokenId], Meta(min_length=1)]
    max_tokens: NumTokens | None = None
