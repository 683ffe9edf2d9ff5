"""The fields of a request repeated in a reply of ``/v1/responses``."""

from typing import Any

from services.gateway.apis.responses.replies.objects import (
    NO_LIST,
    ReasoningShown,
    ResponseObject,
    Status,
    TextShown,
)
from services.gateway.apis.responses.requests.parse import ItemRequest
from services.gateway.chat.replies.reply import Head
from services.gateway.chat.requests.raw_json import NULL
from services.gateway.mesh.job import Job

_ANY_TEXT = {"type": "text"}


def begun_response(
    request: ItemRequest, job: Job, head: Head, is_stored: bool, status: Status = "in_progress"
) -> ResponseObject:
    """The response before its first token."""
    fields = request.fields
    return ResponseObject(
        id=head.id,
        created_at=head.created,
        status=status,
        background=fields.background is True,
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        max_tool_calls=fields.max_tool_calls,
        model=head.model,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        previous_response_id=fields.previous_response_id,
        prompt_cache_key=fields.prompt_cache_key,
        reasoning=_reasoning(request),
        safety_identifier=fields.safety_identifier,
        store=is_stored,
        temperature=job.params.temperature,
        text=TextShown(_format(request)),
        tool_choice="auto" if fields.tool_choice is None else fields.tool_choice,
        tools=NO_LIST if fields.tools == NULL else fields.tools,
        top_logprobs=fields.top_logprobs or 0,
        top_p=job.params.top_p,
        truncation="auto" if job.chat is not None and job.chat.history_limit else "disabled",
        user=fields.user,
        metadata=fields.metadata or {},
    )


def is_summary(request: ItemRequest) -> bool:
    """Whether the client wants reasoning as a summary: our summary is the whole reasoning."""
    return _reasoning(request).summary is not None


def _reasoning(request: ItemRequest) -> ReasoningShown:
    asked = request.fields.reasoning
    if asked is None:
        return ReasoningShown(None, None)
    return ReasoningShown(asked.effort, asked.summary or asked.generate_summary)


def _format(request: ItemRequest) -> Any:
    text = request.fields.text
    if text is None or text.format is None:
        return _ANY_TEXT
    return text.format
