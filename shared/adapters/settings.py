"""Settings of adapters (LoRA)."""

import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode

from shared.settings.base import Settings
from shared.wire.messages import MAX_ADAPTERS

EXAMPLE = 'name=folder, or {"name": "sql", "path": "/adapters/sql"}'
MAX_NAME_CHARS = 256


class LoraModule(BaseModel):
    """An adapter (LoRA) that is loaded at the start; names are vLLM's, ``lora-dir`` is ours."""

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


class AdapterSettings(Settings):
    """Of a worker."""

    enable_lora: bool = Field(
        False,
        description="serve adapters (LoRA); lora-modules and lora-dir imply it",
    )
    lora_modules: LoraModules = Field(
        [],
        description="adapters loaded at the start, as name=folder or JSON"
        ' {"name", "path"}; the folders are PEFT\'s, with safetensors',
    )
    lora_dir: Path | None = Field(
        None,
        description="folder of adapters: each folder in it is loaded at the start under its name;"
        " /v1/load_lora_adapter reads nothing outside it",
    )
    max_loras: int = Field(
        8, ge=1, le=64, description="adapters that running sequences of a worker use at once"
    )
    max_lora_rank: int = Field(64, ge=1, le=512, description="largest rank of an adapter")
    max_cpu_loras: int | None = Field(
        None,
        ge=1,
        le=MAX_ADAPTERS,
        description="memory of a worker for this number of adapters of max-lora-rank that change"
        " linear layers (default: max-loras, or as many as lora-modules)",
    )

    @property
    def has_adapters(self) -> bool:
        return self.enable_lora or bool(self.lora_modules) or self.lora_dir is not None

    @property
    def num_adapters(self) -> int:
        """The most adapters in memory."""
        return self.max_cpu_loras or max(self.max_loras, len(self.lora_modules))

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if (num := len(self.lora_modules)) > self.num_adapters:
            raise ValueError(f"lora-modules: {num} adapters; max-cpu-loras is {self.num_adapters}")
        return self


class AdapterRoutes(Settings):
    """Of a gateway."""

    allow_runtime_lora_updating: bool = Field(
        False,
        description="clients may load and unload adapters: POST /v1/load_lora_adapter,"
        " /v1/unload_lora_adapter",
    )
