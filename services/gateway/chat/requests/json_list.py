"""The lists of a request item by item, each as raw JSON, within bounds on all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, structs

from services.gateway.chat.requests.json_body import json_errors, plain, shown
from services.gateway.chat.requests.schema import MAX_PARTS
from services.gateway.http.violations import violation
from shared.errors import InvalidRequest
from shared.text.json_scan import PIECE_BYTES, TooManyValues, num_values, slices
from shared.text.long_json import CALL_BYTES, decode_text, named, stripped

Taken = TypeVar("Taken")
EMPTY = Raw(b'""')


@json_errors()
def items(
    raw: Raw,
    param: str,
    limit: int,
    take: Callable[[int, Raw], Taken],
    setting: str = "",
    max_values: int | None = None,
) -> list[Taken]:
    """The results of ``take`` for the number and the JSON of each item of a list, one by one.
    Raises InvalidRequest for a value that is not a list, for an empty list, for more items than
    ``limit``, named by ``setting``, and for more than ``max_values`` names and values in all
    items."""
    if not is_list(raw):
        raise _no_list(raw, param)
    taken: list[Taken] = []
    with _bounded(param):
        for some in slices(memoryview(raw), max_values):
            for item in _split(some):
                if len(taken) == limit:
                    raise InvalidRequest(
                        f"{param} has more than {limit} items; the limit is {setting}{limit}",
                        param=param,
                    )
                taken.append(take(len(taken), item))
    if not taken:
        raise InvalidRequest(f"{param} is []; expected array of length >= 1", param=param)
    return taken


def _split(some: memoryview) -> list[Raw]:
    """The items of a slice."""
    if some.nbytes > PIECE_BYTES:
        return [Raw(stripped(some))]
    return msgspec.json.decode(b"".join((b"[", some, b"]")), type=list[Raw])


def typed(raw: Raw, kind: Any, param: str) -> Any:
    """``raw`` as a value of ``kind``; its other fields are not read. Raises InvalidRequest."""
    rest, apart = _set_apart(raw, _raw_fields(kind))
    try:
        value = msgspec.json.decode(rest, type=kind)
    except msgspec.ValidationError as error:
        raise violation(error, param, shown(rest), kind) from None
    for name, found in apart.items():
        match getattr(value, name, None):
            case Raw() as text if text == EMPTY:
                setattr(value, name, Raw(found))
            case "":
                setattr(value, name, decode_text(found))
    return value


@cache
def _raw_fields(kind: Any) -> frozenset[str]:
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return frozenset()
    return frozenset(each.name for each in structs.fields(kind) if each.type is Raw)


def _set_apart(raw: Raw, raw_fields: frozenset[str]) -> tuple[Raw, dict[str, memoryview]]:
    """A long object with empty texts for its long texts and long ``raw_fields``, and those by their
    names, except where a later field has the same name."""
    whole = memoryview(raw)
    if whole.nbytes <= CALL_BYTES or bytes(whole[:1]) != b"{":
        return raw, {}
    apart: dict[str, memoryview] = {}
    rest: list[bytes] = []
    for some in slices(whole):
        names, value = _names(some)
        for name in names:
            apart.pop(name, None)
        if some.nbytes > CALL_BYTES and (names[0] in raw_fields or bytes(value[:1]) == b'"'):
            apart[names[0]] = value
            rest.append(msgspec.json.encode(names[0]) + b':""')
        else:
            rest.append(bytes(some))
    return Raw(b"{%b}" % b",".join(rest)), apart


def _names(some: memoryview) -> tuple[list[str], memoryview]:
    """The names of the fields in a slice, and the value of a long one."""
    if some.nbytes > CALL_BYTES:
        name, value = named(some)
        return [name], value
    return list(msgspec.json.decode(b"".join((b"{", some, b"}")), type=dict[str, Raw])), some


def other_fields(raw: Raw, left_out: str) -> dict[str, Raw]:
    """The fields of an object; ``left_out`` keeps its place alone."""
    rest, apart = _set_apart(raw, frozenset({left_out}))
    fields: dict[str, Raw] = msgspec.json.decode(rest, type=dict[str, Raw])
    for name in apart.keys() - {left_out}:
        decode_text(apart[name])  # in pieces, for its errors
        fields[name] = Raw(apart[name])
    return fields


def check_values(raw: Raw, param: str, max_values: int) -> None:
    """Raises InvalidRequest for more names and values than the limit."""
    with _bounded(param):
        num_values(memoryview(raw), max_values)


def is_list(raw: Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b"["


def is_text(raw: Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b'"'


class PartCount:
    """Counts the parts, calls and blocks in all messages of a request, its field ``param``."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._num = 0

    def add(self, num: int) -> None:
        """Raises InvalidRequest."""
        self._num += num
        if self._num > MAX_PARTS:
            raise InvalidRequest(
                f"{self._param} has {self._num} parts, calls and blocks or more; the limit is"
                f" {MAX_PARTS}",
                param=self._param,
            )


@contextmanager
def _bounded(param: str) -> Iterator[None]:
    try:
        yield
    except TooManyValues as error:
        raise InvalidRequest(
            f"{param} has {error}; the limit is {error.limit}", param=param
        ) from None


def _no_list(raw: Raw, param: str) -> InvalidRequest:
    try:
        msgspec.json.decode(raw, type=list[Raw])
    except msgspec.ValidationError as error:
        return violation(error, param, plain(raw))
    raise AssertionError(f"{param} is a list")
