"""The body of a request as a typed object, or InvalidRequest.

At first only the fields of a body are found, each as raw JSON. The size of a field's value is
bounded before anything is built from it, so no body becomes many times its size.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, structs

from services.gateway.chat.requests import unsupported
from services.gateway.chat.requests.raw_json import MAX_FIELD_BYTES, json_text
from services.gateway.chat.requests.schema import MAX_FIELDS
from services.gateway.chat.requests.unsupported import Neutral
from services.gateway.http.body import Body
from services.gateway.http.log_limit import LogLimit
from services.gateway.http.violations import MAX_SHOWN_CHARS, unknown_model, violation
from shared.errors import InvalidRequest
from shared.process.log import client_text
from shared.text.json_scan import PIECE_BYTES, slices
from shared.text.long_json import named, stripped
from shared.text.surrogates import without_escaped_halves
from shared.wire.messages import ModelInfo

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

Fields = dict[str, Raw]
Request = TypeVar("Request", bound=msgspec.Struct)

MAX_NAMED = 8  # unknown fields in a header
_FIELD_NAME = re.compile(r"[\w.-]+", re.ASCII)


class _Key(str):
    """The name of a field: msgspec calls a type of our own for each key, so that we count keys."""

    __slots__ = ()


@contextmanager
def json_errors() -> Iterator[None]:
    """Invalid JSON is an InvalidRequest."""
    try:
        yield
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from None


@json_errors()
def decode(body: Body) -> Fields:
    """The fields of an object, which share the memory of ``body``. The JSON of a long field is
    checked when the field is read. Half a surrogate pair, left by a cut text, is U+FFFD
    anywhere."""
    body = without_escaped_halves(body)
    numbers = count(1)

    def to_key(_: type, name: str) -> _Key:
        if next(numbers) > MAX_FIELDS:
            raise InvalidRequest(f"the body has more fields than the limit, {MAX_FIELDS}")
        return _Key(name)

    def read(some: Body) -> None:
        found = msgspec.json.decode(some, type=dict[_Key, Raw], dec_hook=to_key)
        fields.update((str(name), raw) for name, raw in found.items())

    fields: Fields = {}
    try:
        whole = stripped(memoryview(body))
        if len(body) <= PIECE_BYTES or bytes(whole[:1]) != b"{":
            read(body)
            return fields
        for some in slices(whole):
            if some.nbytes <= PIECE_BYTES:
                read(b"".join((b"{", some, b"}")))
            else:
                name, value = named(some)
                fields[to_key(_Key, name)] = Raw(value)
        return fields
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is no object: {error}") from None


@json_errors()
def check(fields: Fields, kind: type[Request], neutral: Neutral) -> Request:
    """The typed request; fields of type Raw stay raw. A field unknown to clients of OpenAI and vLLM
    is logged and ignored."""
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
    """Names the request's fields without effect, for a header. Of unknown fields it names only the
    first ones with names allowed in a header."""
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
    """The value; of a large one ``raw`` itself."""
    return raw if memoryview(raw).nbytes > MAX_FIELD_BYTES else shown(raw)


def shown(raw: Raw) -> Any:
    """The value; of a number out of range ``raw`` itself."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError:
        return raw


DEFAULT_MODEL = "default"  # FastDeploy's clients ask for it


def served_name(name: str | None, model: ModelInfo) -> str:
    """Raises NotFound. SGLang's clients name a variant ``model:variant``."""
    if name is None or (name == DEFAULT_MODEL and DEFAULT_MODEL not in model.names):
        return model.names[0]
    base, _, variant = name.partition(":")
    if name not in model.names and not {base, variant} <= {*model.names}:
        raise unknown_model(name, model.names)
    return name


class _Field:
    """A field of a request: ``read`` makes a typed value from its JSON."""

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
