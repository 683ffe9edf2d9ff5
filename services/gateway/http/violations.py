"""Violations in a request as errors that a client can act on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from shared.errors import InvalidRequest, NotFound, RequestError

MAX_SHOWN_CHARS = 60
MAX_NAMES = 32

_PATH = re.compile(r"(?P<reason>.*) - at `\$(?P<path>.*)`", re.DOTALL)
_NO_NAME = re.compile(r"[^\w.$\[\]-]", re.ASCII)
_STEP = re.compile(r"(\w+)|\[(\d+)\]")
_WRONG_WORD = ("Invalid enum value", "Invalid value")
_FIELD = re.compile(r"Object (?P<reason>missing required|contains unknown) field `(?P<name>.*)`")


def violation(
    error: msgspec.ValidationError, param: str, value: Any, kind: Any = None
) -> InvalidRequest:
    """msgspec's error for this ``value`` of the field ``param``: the place in it, the fault, the
    limit. ``kind`` is the expected type of the value or of each of its items."""
    reason, path = _split(str(error))
    where = param + path
    if match := _FIELD.fullmatch(reason):
        where = f"{where}.{match['name'][:MAX_SHOWN_CHARS]}"
        is_missing = match["reason"] == "missing required"
        text = "is required" if is_missing else "is not a field of this object"
        return InvalidRequest(f"{where} {text}", param=where)
    text = reason[:1].lower() + reason[1:].replace("`", "")
    if reason.startswith(_WRONG_WORD) and (words := _words(kind)):
        text = f"expected one of {', '.join(words)}"
    return InvalidRequest(f"{where} is {show(_value_at(path, value))}; {text}", param=where)


def _words(kind: Any) -> list[str]:
    """The literal values of ``kind``, and the tags of its structs."""
    if kind is None:
        return []
    info = msgspec.inspect.type_info(kind)
    kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    words: list[str] = []
    for each in kinds:
        if isinstance(each, msgspec.inspect.LiteralType):
            words += map(str, each.values)
        elif isinstance(each, msgspec.inspect.StructType) and each.tag is not None:
            words.append(str(each.tag))
    return words


def unknown_model(name: str, served: list[str]) -> NotFound:
    more = f" and {len(served) - MAX_NAMES} more" if len(served) > MAX_NAMES else ""
    return NotFound(
        f"model is {show(name)}; served here: {', '.join(served[:MAX_NAMES])}{more}",
        param="model",
        code="model_not_found",
    )


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the mesh name a field as the client does; ``names`` maps differing names, of whole
    fields or of the beginnings of paths."""
    try:
        yield
    except RequestError as error:
        if error.param is not None and (beginning := _named_part(error.param, names)):
            before, error.param = error.param, names[beginning] + error.param[len(beginning) :]
            if error.message.startswith(before):
                error.message = error.param + error.message[len(before) :]
        raise


def not_held(places: Sequence[str], names: Mapping[str, str]) -> Iterator[str]:
    """Warnings in a header for parts that the mesh left out of schemas; ``names`` as in
    client_names."""
    for place in places:
        beginning = _named_part(place, names)
        named = names.get(beginning, "") + place[len(beginning) :]
        yield f"{_NO_NAME.sub('_', named)}: not enforced"


def _named_part(param: str, names: Mapping[str, str]) -> str:
    """The part of the path with another name; empty: no part."""
    ends = [len(param), *(match.start() for match in re.finditer(r"[.[]", param))]
    return max((param[:end] for end in ends if param[:end] in names), key=len, default="")


def show(value: Any) -> str:
    """``value``, or its JSON, in a few characters, for a client."""
    match value:
        case {"type": str(kind)}:
            return f"an object of type {show(kind)}"
        case dict():
            return "an object" if value else "{}"
        case list():
            return f"a list of {len(value)}" if value else "[]"
        case msgspec.Raw():
            return _cut(bytes(memoryview(value)[: MAX_SHOWN_CHARS + 3]).decode(errors="replace"))
        case str():
            shown = value[: MAX_SHOWN_CHARS + 1].encode(errors="replace").decode()  # no half pairs
            return _cut(msgspec.json.encode(shown).decode())
        case _:
            return _cut(msgspec.json.encode(value).decode())


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS + 2 else text[:MAX_SHOWN_CHARS] + "…"


def _split(text: str) -> tuple[str, str]:
    match = _PATH.fullmatch(text)
    return (match["reason"], match["path"]) if match else (text, "")


def _value_at(path: str, value: Any) -> Any:
    """Of a value that is not read the whole."""
    for name, index in _STEP.findall(path):
        if isinstance(value, msgspec.Raw):
            break
        value = value[name] if name else value[int(index)]
    return value
