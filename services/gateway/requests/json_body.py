"""The body of a request as a typed object, or InvalidRequest.

Of a body only the fields are found at first, each as the JSON it is. What a field may hold is
bounded before anything is made of it, so that no body becomes many times its size.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, structs

from services.gateway.log_limit import LogLimit
from services.gateway.requests import unsupported
from services.gateway.requests.raw_json import MAX_FIELD_BYTES, json_text
from services.gateway.requests.schema import MAX_FIELDS
from services.gateway.requests.unsupported import Neutral
from services.gateway.requests.violations import MAX_SHOWN_CHARS, unknown_model, violation
from shared.errors import InvalidRequest
from shared.log import client_text
from shared.messages import ModelInfo
from shared.surrogates import without_escaped_halves

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

Body = bytes | bytearray
Fields = dict[str, Raw]
Request = TypeVar("Request", bound=msgspec.Struct)
Taken = TypeVar("Taken")

MAX_NAMED = 8  # unknown fields in a header
_FIELD_NAME = re.compile(r"[\w.-]+", re.ASCII)


class _Key(str):
    """The name of a field: msgspec hands us each key of a type of our own, so that we count."""

    __slots__ = ()


class _Item:
    """An item of a list, which is counted in the same way."""


_ITEM = _Item()


@contextmanager
def json_errors() -> Iterator[None]:
    """What is no JSON is an InvalidRequest."""
    try:
        yield
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from None


@json_errors()
def decode(body: Body) -> Fields:
    """The fields of an object, which share memory. Half a surrogate pair, which a cut text leaves,
    is U+FFFD wherever it is."""
    numbers = count(1)

    def to_key(_: type, name: str) -> _Key:
        if next(numbers) > MAX_FIELDS:
            raise InvalidRequest(f"the body has more fields than the limit, {MAX_FIELDS}")
        return _Key(name)

    try:
        whole = without_escaped_halves(body)
        fields = msgspec.json.decode(whole, type=dict[_Key, Raw], dec_hook=to_key)
        return {str(name): raw for name, raw in fields.items()}
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is no object: {error}") from None


@json_errors()
def items(
    raw: Raw, param: str, limit: int, take: Callable[[int, Any], Taken], setting: str = ""
) -> list[Taken]:
    """What ``take`` makes of the number and the value of each item of a list, one by one. Raises
    InvalidRequest for what is no list, and for an empty one or one of more than ``limit``, which
    ``setting`` names."""
    taken: list[Taken] = []

    def to_item(_: type, value: Any) -> _Item:
        if len(taken) == limit:
            raise InvalidRequest(
                f"{param} has more than {limit} items; the limit is {setting}{limit}", param=param
            )
        taken.append(take(len(taken), value))
        return _ITEM

    try:
        msgspec.json.decode(raw, type=list[_Item], dec_hook=to_item)
    except msgspec.ValidationError as error:
        raise violation(error, param, plain(raw)) from None
    if not taken:
        raise InvalidRequest(f"{param} is []; expected array of length >= 1", param=param)
    return taken


@json_errors()
def check(fields: Fields, kind: type[Request], neutral: Neutral) -> Request:
    """The typed request; fields of type Raw are left as they are. What no client of OpenAI or vLLM
    knows is logged and ignored."""
    unbuilt = {name: plain(raw) for name, raw in fields.items() if name in neutral}
    unsupported.refuse_unsupported(unbuilt, neutral)
    values: dict[str, Any] = {}
    for field in _fields_of(kind):
        if field.name in fields:
            values[field.name] = field.read(fields[field.name])
        elif field.is_required:
            raise InvalidRequest(f"{field.name} is required", param=field.name)
    if unknown := _unknown(fields, kind, neutral):
        log.info("ignored unknown fields of a request: %s", client_text(", ".join(unknown)))
    return kind(**values)


@json_errors()
def in_vain(fields: Fields, kind: type[msgspec.Struct], neutral: Neutral) -> tuple[str, ...]:
    """Names the fields that a request of this kind has, and that change nothing: for a header, so
    the first ones of those that nobody knows, where a header can hold their names."""
    names = unsupported.WITHOUT_EFFECT.keys() & fields.keys() - {*kind.__struct_fields__}
    unknown = [name for name in _unknown(fields, kind, neutral) if _FIELD_NAME.fullmatch(name)]
    return (
        *unsupported.warnings_of({name: plain(fields[name]) for name in names}),
        *(f"{name}: unknown, ignored" for name in unknown[:MAX_NAMED]),
    )


def _unknown(fields: Fields, kind: type[msgspec.Struct], neutral: Neutral) -> list[str]:
    known = {*kind.__struct_fields__, *neutral, *unsupported.WITHOUT_EFFECT}
    return [name[:MAX_SHOWN_CHARS] for name in sorted(fields.keys() - known)]


def plain(raw: Raw) -> Any:
    """The value; of one that is large ``raw`` itself."""
    return raw if memoryview(raw).nbytes > MAX_FIELD_BYTES else msgspec.json.decode(raw)


def served_name(name: str | None, model: ModelInfo) -> str:
    """Raises NotFound."""
    if name is None:
        return model.names[0]
    if name not in model.names:
        raise unknown_model(name, model.names)
    return name


class _Field:
    """A field of a request: ``read`` makes a typed value of its JSON."""

    def __init__(self, info: structs.FieldInfo) -> None:
        self.name = info.name
        self.is_required = info.required
        self._kind = info.type
        self._decoder = None if info.type is Raw else msgspec.json.Decoder(info.type)

    def read(self, raw: Raw) -> Any:
        if self._decoder is None:
            return raw
        text = json_text(raw, self.name)
        try:
            return self._decoder.decode(text)
        except msgspec.ValidationError as error:
            raise violation(error, self.name, msgspec.json.decode(text), self._kind) from None


@cache
def _fields_of(kind: type[msgspec.Struct]) -> list[_Field]:
    return [_Field(info) for info in structs.fields(kind)]
