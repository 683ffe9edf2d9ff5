"""What is wrong in a request, as an error that a client can act on."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from shared.errors import InvalidRequest, NotFound, RequestError

MAX_SHOWN_CHARS = 60

_PATH = re.compile(r"(?P<reason>.*) - at `\$\.?(?P<path>.*)`", re.DOTALL)
_STEP = re.compile(r"(\w+)|\[(\d+)\]")
_FIELD = re.compile(r"Object (?P<reason>missing required|contains unknown) field `(?P<name>.*)`")


def violation(error: msgspec.ValidationError, body: Any) -> InvalidRequest:
    """What msgspec found, with the field, its value in ``body`` and the limit."""
    reason, path = _split(str(error))
    if match := _FIELD.fullmatch(reason):
        param = ".".join(part for part in (path, match["name"][:MAX_SHOWN_CHARS]) if part)
        is_missing = match["reason"] == "missing required"
        text = "is required" if is_missing else "is not a field of this object"
        return InvalidRequest(f"{param} {text}", param=param)
    text = reason[:1].lower() + reason[1:].replace("`", "")
    return InvalidRequest(f"{path} is {show(_value_at(path, body))}; {text}", param=path)


def unknown_model(name: str, served: list[str]) -> NotFound:
    return NotFound(
        f"model is {show(name)}; served here: {', '.join(served)}",
        param="model",
        code="model_not_found",
    )


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """An error of the mesh names the field as the client does; ``names`` are those that differ."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise


def show(value: Any) -> str:
    """``value`` in a few characters, for a client."""
    match value:
        case {"type": str(kind)}:
            return f"an object of type {show(kind)}"
        case dict():
            return "an object" if value else "{}"
        case list():
            return f"a list of {len(value)}" if value else "[]"
        case str():
            return _cut(msgspec.json.encode(value[: MAX_SHOWN_CHARS + 1]).decode())
        case _:
            return _cut(msgspec.json.encode(value).decode())


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS + 2 else text[:MAX_SHOWN_CHARS] + "…"


def _split(text: str) -> tuple[str, str]:
    match = _PATH.fullmatch(text)
    return (match["reason"], match["path"]) if match else (text, "")


def _value_at(path: str, body: Any) -> Any:
    for name, index in _STEP.findall(path):
        body = body[name] if name else body[int(index)]
    return body
