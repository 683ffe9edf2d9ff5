"""OpenAI's error object."""

from services.gateway.responses.json_reply import event
from services.gateway.responses.openai import Error, ErrorReply
from shared.errors import RequestError


def error_body(error: RequestError) -> ErrorReply:
    return ErrorReply(Error(error.message, error.type, error.param, error.code))


def error_event(error: RequestError) -> bytes:
    return event(error_body(error))
