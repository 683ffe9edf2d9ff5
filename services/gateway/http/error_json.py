"""OpenAI's error object."""

from services.gateway.chat.replies.openai import Error, ErrorReply
from services.gateway.http.json_reply import event
from shared.errors import RequestError


def error_body(error: RequestError) -> ErrorReply:
    return ErrorReply(Error(error.message, error.type, error.param, error.code))


def error_event(error: RequestError) -> bytes:
    return event(error_body(error))
