"""Bodies of ``/tokenize`` and ``/detokenize``."""

from dataclasses import dataclass

from msgspec import Raw, Struct

from services.gateway.chat.media import NO_MEDIA, Media
from services.gateway.chat.requests.chat_options import (
    NO_LIMIT,
    chat_options,
    listed_tools,
    requested_limit,
)
from services.gateway.chat.requests.chat_prompt import chat_prompt
from services.gateway.chat.requests.json_body import check, decode, served_name
from services.gateway.chat.requests.prompts import ids_prompt, text_prompt
from services.gateway.chat.requests.raw_json import NULL
from services.gateway.chat.requests.sampling import max_prompt_tokens
from services.gateway.chat.requests.schema import (
    ChatRequest,
    ChatTemplate,
    NumPromptTokens,
    TruncationSide,
)
from services.gateway.chat.requests.unsupported import Neutral
from services.gateway.http.body import Body
from services.gateway.mesh.job import Prompt
from shared.errors import InvalidRequest
from shared.wire.messages import ChatOptions, ModelInfo

NEUTRAL: Neutral = {"functions": ([],)}


class TokenizeRequest(Struct, kw_only=True):
    """Either a prompt or messages, which may come with more for their template."""

    model: str | None = None
    prompt: Raw = NULL
    messages: Raw = NULL
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    return_token_offsets: bool | None = None
    truncate_prompt_tokens: NumPromptTokens | None = None
    truncation_side: TruncationSide | None = None
    history_limit: NumPromptTokens | None = None
    tools: Raw = NULL
    documents: Raw = NULL
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: Raw = NULL
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: Raw = NULL


class DetokenizeRequest(Struct, kw_only=True):
    tokens: Raw
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Conversion:
    """A text or ids to convert; ``param`` is the field that holds them. The result is cut to
    ``max_prompt_tokens``, the last unless it ``keeps_prompt_start``."""

    prompt: Prompt
    param: str
    adds_special_tokens: bool = False
    returns_strings: bool = False
    chat: ChatOptions | None = None
    returns_offsets: bool = False
    max_prompt_tokens: int | None = None
    keeps_prompt_start: bool = False


def parse_tokenize(body: Body, model: ModelInfo, media: Media = NO_MEDIA) -> Conversion:
    """A body of ``/tokenize``. Chat templates mostly write the special tokens, texts do not."""
    request = check(decode(body), TokenizeRequest, NEUTRAL)
    served_name(request.model, model)
    is_text = request.messages == NULL
    if is_text == (request.prompt == NULL):
        raise InvalidRequest("either prompt or messages is required", param="prompt")
    chat = _chat_of(request)
    history = requested_limit(chat, NO_LIMIT, None, model)
    tools, _ = listed_tools(request.tools)
    options = chat_options(chat, tools, history_limit=history)
    if is_text and options != ChatOptions():
        raise InvalidRequest(
            "a prompt goes through no chat template; what it gets is allowed with messages only",
            param="prompt",
        )
    if is_text:
        prompt = text_prompt(request.prompt)
        NO_MEDIA.options(request.mm_processor_kwargs, has_files=False)
    else:
        prompt = chat_prompt(chat, media, model)
    adds_special_tokens = request.add_special_tokens
    return Conversion(
        prompt=prompt,
        param="prompt" if is_text else "messages",
        adds_special_tokens=is_text if adds_special_tokens is None else adds_special_tokens,
        returns_strings=bool(request.return_token_strs),
        chat=None if is_text else options,
        returns_offsets=bool(request.return_token_offsets),
        max_prompt_tokens=max_prompt_tokens(request.truncate_prompt_tokens, 0, model),
        keeps_prompt_start=request.truncation_side == "right",
    )


def _chat_of(request: TokenizeRequest) -> ChatRequest:
    """The fields that a chat has too."""
    names = {*ChatRequest.__struct_fields__} & {*TokenizeRequest.__struct_fields__}
    return ChatRequest(**{name: getattr(request, name) for name in names})


def parse_detokenize(body: Body, model: ModelInfo) -> Conversion:
    """A body of ``/detokenize``."""
    request = check(decode(body), DetokenizeRequest, {})
    served_name(request.model, model)
    return Conversion(ids_prompt(request.tokens, model, "tokens"), "tokens")
