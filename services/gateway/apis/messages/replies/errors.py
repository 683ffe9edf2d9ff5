"""Errors as clients of Anthropic's API know them. Pure."""

import re
from http import HTTPStatus

from services.gateway.apis.messages.replies.objects import Error, ErrorReply
from shared.errors import RequestError

OVERLOADED = 529
TOO_LONG = "prompt is too long"
"""Clients look for these words, and then send a shorter prompt."""

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
_SCHEMA = re.compile(r"(tools\[\d+\])\.function\.parameters")
_FUNCTION = re.compile(r"(tools\[\d+\])\.function")
_INDEX = re.compile(r"\[(\d+)\]")


def anthropic_status(error: RequestError) -> int:
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return OVERLOADED
    return error.status


def anthropic_error(error: RequestError, request_id: str) -> ErrorReply:
    status = anthropic_status(error)
    default = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    return ErrorReply(Error(_TYPES.get(status, default), _message(error)), request_id)


def _message(error: RequestError) -> str:
    """With the path of the field as Anthropic writes it: ``messages.1.content.0.type``."""
    text, param = error.message, error.param or ""
    if param:
        text = text.replace(param, _path(param))
    return f"{TOO_LONG}: {text}" if error.code == "context_length_exceeded" else text


def _path(param: str) -> str:
    """The path in the words of the Messages API, if the mesh named a field of a chat."""
    param = _FUNCTION.sub(r"\1", _SCHEMA.sub(r"\1.input_schema", param))
    return _INDEX.sub(r".\1", param)
