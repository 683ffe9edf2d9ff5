"""Settings that are a JSON object, or a mapping in the file."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Object = TypeVar("Object", bound=BaseModel)


def read_object(value: Any, hint: str = "") -> dict[str, Any]:
    """``value``, a mapping or its JSON text, as a mapping. Raises ValueError."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object (in a file a mapping){hint}")
    return found


def reader_of(kind: type[Object], example: str) -> Callable[[Any], Object]:
    """Returns a reader of ``kind`` from a mapping or JSON text. The reader raises ValueError that
    names every wrong key, or shows the ``example``."""

    def read(value: Any) -> Object:
        if isinstance(value, kind):
            return value
        found = read_object(value, f", such as {example}")
        try:
            return kind(**{str(key).replace("-", "_"): each for key, each in found.items()})
        except ValidationError as error:
            wrong = (_wrong_key(detail, kind) for detail in error.errors())
            raise ValueError("; ".join(wrong)) from None

    return read


def message_of(detail: Any) -> str:
    """The message of one of pydantic's errors, in the words of ours."""
    text: str = detail["msg"].removeprefix("Value error, ").partition(", unable to")[0]
    return text.replace("Input should be", "must be")


def _wrong_key(detail: Any, kind: type[BaseModel]) -> str:
    name = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        names = ", ".join(kind.model_fields)
        return f"{name}: no such key; known keys: {names}"
    text = message_of(detail)
    return f"{name}: {text}" if name else text
