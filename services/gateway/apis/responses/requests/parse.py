"""The body of a request to ``/v1/responses`` to a Job, or InvalidRequest (NotFound for the model).

The Job is a chat's: differences are removed here, and restored in ``responses/replies``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from services.gateway.apis.responses.requests.conversation import Decrypt, chat_messages
from services.gateway.apis.responses.requests.input_items import read_input
from services.gateway.apis.responses.requests.schema import (
    LOGPROBS,
    NEUTRAL,
    AnyText,
    JsonObject,
    JsonSchema,
    ResponseRequest,
)
from services.gateway.apis.responses.requests.tools import ItemTools, chat_choice, read_tools
from services.gateway.chat.media import NO_MEDIA, Media
from services.gateway.chat.requests import format_schema as chat
from services.gateway.chat.requests.chat_options import ALL_THAT_FIT, NO_LIMIT
from services.gateway.chat.requests.json_body import check, decode, in_vain
from services.gateway.chat.requests.parse import Limits, chat_job
from services.gateway.chat.requests.raw_json import NULL
from services.gateway.chat.requests.schema import ChatRequest, GenerationRequest, StreamOptions
from services.gateway.chat.requests.unsupported import unsupported as refusal
from services.gateway.http.body import Body
from services.gateway.http.violations import client_names
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo

SCHEMA = "text.format.schema"
_HISTORY_LIMITS = {None: None, "auto": ALL_THAT_FIT, "disabled": NO_LIMIT}
FIELD_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "history_limit": "truncation",
}
"""The names of a chat's fields here, where they differ."""


@dataclass(frozen=True)
class ItemRequest:
    """A request with its own fields checked; ``items`` are the JSON of its input. ``warnings`` name
    ignored fields."""

    fields: ResponseRequest
    items: list[bytes]
    tools: ItemTools
    warnings: tuple[str, ...]


def read_request(body: Body, media: Media = NO_MEDIA) -> ItemRequest:
    """The result shares no memory with ``body``, except fields that go into the Job. Raises
    InvalidRequest."""
    found = decode(body)
    request = check(found, ResponseRequest, NEUTRAL)
    warnings = in_vain(found, ResponseRequest, NEUTRAL)
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        warnings += ("text.verbosity: it changes nothing here",)
    if request.stream_options is not None:
        _check_usage(request.stream_options)
    if request.top_logprobs and not request.includes(LOGPROBS):
        raise InvalidRequest(
            f"top_logprobs is {request.top_logprobs}; it is allowed with include {LOGPROBS} only",
            param="top_logprobs",
        )
    items, tools = read_input(request.input, media), read_tools(request.tools)
    request.input, request.tools = NULL, request.tools.copy()
    if request.text is not None and isinstance(request.text.format, JsonSchema):
        request.text.format.schema = request.text.format.schema.copy()
    return ItemRequest(request, items, tools, (*warnings, *tools.warnings))


def _check_usage(options: StreamOptions) -> None:
    """Only the end of a stream has the usage."""
    if options.include_usage is False:
        raise refusal("stream_options.include_usage", False, "null or true")
    if options.continuous_usage_stats:
        raise refusal("stream_options.continuous_usage_stats", True, "null or false")


def response_job(
    request: ItemRequest,
    items: Sequence[bytes],
    decrypt: Decrypt,
    model: ModelInfo,
    limits: Limits,
) -> Job:
    """``items`` are the whole conversation. Raises InvalidRequest, NotFound."""
    fields = request.fields
    same = {name: getattr(fields, name) for name in GenerationRequest.__struct_fields__}
    changed: dict[str, Any] = {
        "max_tokens": fields.max_output_tokens,
        "response_format": same["response_format"] or _response_format(fields),
    }
    num_before = len(items) - len(request.items)
    messages = chat_messages(fields.instructions, items, decrypt, num_before)
    names = FIELD_NAMES | messages.places
    chat_request = ChatRequest(
        **(same | changed),
        messages=messages.json,
        logprobs=fields.includes(LOGPROBS),
        top_logprobs=fields.top_logprobs,
        tools=request.tools.for_chat,
        tool_choice=chat_choice(fields.tool_choice, request.tools),
        parallel_tool_calls=fields.parallel_tool_calls,
        reasoning_effort=fields.reasoning.effort if fields.reasoning is not None else None,
        documents=fields.documents,
        chat_template=fields.chat_template,
        chat_template_kwargs=fields.chat_template_kwargs,
        history_limit=_HISTORY_LIMITS[fields.truncation],
        mm_processor_kwargs=fields.mm_processor_kwargs,
    )
    with client_names(names):
        job = chat_job(chat_request, model, limits)
    fields.documents = fields.chat_template_kwargs = fields.mm_processor_kwargs = NULL
    if job.format is not None and job.format.param.startswith("response_format.json_schema"):
        job = replace(job, format=structs.replace(job.format, param=SCHEMA))
    return replace(
        job,
        field_names=job.field_names | names | request.tools.field_names,
        warnings=request.warnings,
    )


def _response_format(fields: ResponseRequest) -> Any:
    """``text.format`` as the field ``response_format`` of a chat."""
    match fields.text.format if fields.text is not None else None:
        case JsonSchema(schema=schema, name=name, description=description, strict=strict):
            return chat.JsonSchema(chat.NamedSchema(schema, name, description, strict))
        case JsonObject():
            return chat.JsonObject()
        case AnyText():
            return chat.AnyText()
        case _:
            return None
