"""The body of a request as a typed object, or InvalidRequest."""

import logging
from typing import Any, TypeVar

import msgspec

from services.gateway import unsupported
from services.gateway.unsupported import Neutral
from services.gateway.violations import show, unknown_model, violation
from shared.errors import InvalidRequest
from shared.log import client_text
from shared.messages import ModelInfo

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=msgspec.Struct)


def decode(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"the body is {show(fields)}; expected an object")
    return fields


def encode(part: Any) -> bytes:
    """A part of a body as JSON again."""
    try:
        return msgspec.json.encode(part)
    except RecursionError:
        raise _too_deep() from None


def check(fields: dict[str, Any], kind: type[Request], neutral: Neutral) -> Request:
    """The typed request. What no client of OpenAI or vLLM knows is logged and ignored."""
    unsupported.refuse_unsupported(fields, neutral)
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise violation(error, fields) from None
    known = {*kind.__struct_fields__, *neutral, *unsupported.WITHOUT_EFFECT}
    if unknown := fields.keys() - known:
        log.info("ignored unknown fields of a request: %s", client_text(", ".join(sorted(unknown))))
    return request


def served_name(name: str | None, model: ModelInfo) -> str:
    """Raises NotFound."""
    if name is None:
        return model.names[0]
    if name not in model.names:
        raise unknown_model(name, model.names)
    return name


def _too_deep() -> InvalidRequest:
    return InvalidRequest("the body is nested too deeply", code="invalid_json")
