"""OpenAI's error object."""

from msgspec import Struct

from services.gateway.http.json_reply import event
from shared.errors import RequestError


class Error(Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct):
    error: Error


def error_body(error: RequestError) -> ErrorReply:
    return ErrorReply(Error(error.message, error.type, error.param, error.code))


def error_event(error: RequestError) -> bytes:
    return event(error_body(error))
