"""The settings of adapters (LoRA); names are vLLM's, ``lora-dir`` is ours."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_settings import NoDecode

EXAMPLE = 'name=folder, or {"name": "sql", "path": "/adapters/sql"}'
MAX_NAME_CHARS = 256


class LoraModule(BaseModel):
    """An adapter that is loaded at the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    path: Path
    base_model_name: str | None = None  # vLLM's; there is one base


def _read_modules(value: Any) -> Any:
    """Reads name=folder, JSON objects, or several of either: a list, or separated by commas."""
    if isinstance(value, str):
        value = _split(value)
    values = value if isinstance(value, list) else [value]
    modules = [_read_module(each) for each in values]
    names = [each["name"] if isinstance(each, dict) else each.name for each in modules]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is the name of two adapters")
    return modules


def _split(text: str) -> Any:
    if not text.startswith(("[", "{")):
        return text.split(",") if text else []
    try:
        return json.loads(text if text.startswith("[") else f"[{text}]")
    except ValueError:
        raise ValueError(f"expected {EXAMPLE}") from None


def _read_module(value: Any) -> Any:
    if isinstance(value, LoraModule):
        return value
    if isinstance(value, str) and value.startswith("{"):
        value = _split(value)[0]
    if isinstance(value, str):
        name, separator, path = value.partition("=")
        value = {"name": name, "path": path} if separator and path else None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"expected {EXAMPLE}")
    return value


LoraModules = Annotated[list[LoraModule], NoDecode, BeforeValidator(_read_modules)]
