"""The bodies of ``/v1/messages`` and of its count of tokens, as a chat."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, structs

from services.gateway.apis.messages.requests.blocks import Conversation
from services.gateway.apis.messages.requests.schema import (
    AdaptiveThinking,
    ClearThinking,
    EnabledThinking,
    JsonFormat,
    MessagesRequest,
    PromptRequest,
)
from services.gateway.apis.messages.requests.tools import chat_choice, chat_tools, is_parallel
from services.gateway.chat.media import Media
from services.gateway.chat.requests.chat_options import TEXT_SHARE, history_limit
from services.gateway.chat.requests.format_schema import JsonSchema, NamedSchema
from services.gateway.chat.requests.json_body import check, decode, in_vain
from services.gateway.chat.requests.parse import SWITCHES, Limits, chat_job
from services.gateway.chat.requests.raw_json import NULL
from services.gateway.chat.requests.schema import ChatRequest
from services.gateway.chat.requests.unsupported import Neutral
from services.gateway.http.body import Body
from services.gateway.http.violations import client_names
from services.gateway.mesh.job import Job, Parsing
from shared.dialects.known import KNOWN
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo


class MessagesPrompt(NamedTuple):
    """The ``chat`` of a prompt. ``warnings`` name fields without effect here, ``places`` are the
    client's names of parts of the chat."""

    chat: ChatRequest
    warnings: list[str]
    places: dict[str, str]


_ANY_TEXT = Parsing(
    tool_parser="",
    reasoning_parser="",
    tools="",
    separates_reasoning=True,
    shows_reasoning=True,
    is_parallel=True,
    is_held=False,
    is_named=False,
    is_legacy=False,
)


@dataclass(frozen=True, slots=True)
class ParsedMessages:
    """Unless it ``shows_thinking`` a reply has blocks of thinking without their text."""

    job: Job
    shows_thinking: bool


def parse_messages(body: Body, model: ModelInfo, limits: Limits) -> ParsedMessages:
    """A body of ``/v1/messages``. Raises InvalidRequest (NotFound for the model)."""
    fields = decode(body)
    request = check(fields, MessagesRequest, NEUTRAL)
    chat, warnings, places = prompt_of(request, model, limits.media)
    chat.max_tokens = request.max_tokens
    chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
    chat.stop, chat.stream, chat.slo = request.stop_sequences, request.stream, request.slo
    _set_budget(chat, request, model, warnings)
    with client_names(places):
        job = chat_job(chat, model, limits)
    format, param = _format(request)
    # A bound that counts as far as the context goes asks for no room beyond that.
    room = min(request.max_tokens, model.max_model_len // TEXT_SHARE)
    history = history_limit(limits.history_limit, room, model)
    job = replace(
        job,
        text=structs.replace(job.text, fits_max_tokens=True),
        chat=structs.replace(job.chat, history_limit=history) if job.chat else None,
        format=structs.replace(job.format, param=param) if job.format and format else None,
        field_names=job.field_names | places | {"reasoning_budget": "thinking.budget_tokens"},
        parsing=replace(job.parsing or _ANY_TEXT, is_named=False),
        warnings=(*warnings, *in_vain(fields, MessagesRequest, NEUTRAL)),
    )
    return ParsedMessages(job, getattr(request.thinking, "display", None) != "omitted")


def parse_prompt(body: Body, model: ModelInfo, media: Media) -> MessagesPrompt:
    """A body of ``/v1/messages/count_tokens``. Raises InvalidRequest."""
    return prompt_of(check(decode(body), PromptRequest, NEUTRAL), model, media)


def prompt_of(request: PromptRequest, model: ModelInfo, media: Media) -> MessagesPrompt:
    """Raises InvalidRequest."""
    conversation = Conversation(model, media)
    conversation.add_system(request.system)
    conversation.add_turns(request.messages)
    conversation.mark(request.cache_control)
    tools = chat_tools(request.tools, conversation.mark)
    warnings = _warnings(request, model)
    if conversation.num_foreign:
        warnings.append("messages: thinking of another model is left out")
    chat = ChatRequest(
        messages=_raw(conversation.chat()),
        model=request.model,
        tools=_raw(tools) if tools else NULL,
        tool_choice=chat_choice(request, {tool["function"]["name"] for tool in tools}),
        parallel_tool_calls=is_parallel(request),
        continue_final_message=conversation.is_prefilled,
        cache_ttl=conversation.retention_s or None,
        chat_template_kwargs=_raw(_template_kwargs(request)),
        response_format=_response_format(request),
    )
    return MessagesPrompt(chat, warnings, conversation.places)


def _raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))


def _thinks(request: PromptRequest) -> bool:
    """Without a thinking request a client expects the answer first: that is Anthropic's default."""
    return isinstance(request.thinking, EnabledThinking | AdaptiveThinking)


def _template_kwargs(request: PromptRequest) -> dict[str, Any]:
    effort = request.output_config.effort if request.output_config is not None else None
    kwargs: dict[str, Any] = dict.fromkeys(SWITCHES, _thinks(request))
    return kwargs if effort is None else kwargs | {"reasoning_effort": effort}


def _set_budget(
    chat: ChatRequest, request: MessagesRequest, model: ModelInfo, warnings: list[str]
) -> None:
    if not isinstance(request.thinking, EnabledThinking) or not model.reasoning_parser:
        return
    if not KNOWN.reasoning[model.reasoning_parser].close:
        warnings.append("thinking.budget_tokens: the model's channels know no budget")
    else:
        chat.thinking_token_budget = request.thinking.budget_tokens


def _format(request: PromptRequest) -> tuple[JsonFormat | None, str]:
    """The format, and the field of its schema."""
    config = request.output_config
    if config is not None and config.format is not None:
        if request.output_format is not None:
            raise InvalidRequest(
                "output_config.format and output_format are both given", param="output_format"
            )
        return config.format, "output_config.format.schema"
    return request.output_format, "output_format.schema"


def _response_format(request: PromptRequest) -> JsonSchema | None:
    format, _ = _format(request)
    return None if format is None else JsonSchema(NamedSchema(_raw(format.schema)))


def _warnings(request: PromptRequest, model: ModelInfo) -> list[str]:
    warnings = []
    if _thinks(request) and not model.reasoning_parser:
        warnings.append("thinking: the model has no reasoning-parser")
    management = request.context_management
    edits = management.edits if management is not None else None
    if any(not isinstance(edit, ClearThinking) or edit.keep != "all" for edit in edits or ()):
        warnings.append("context_management: nothing is cleared")
    return warnings


NEUTRAL: Neutral = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
