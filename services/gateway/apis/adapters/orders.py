"""The bodies of ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, in vLLM's shape."""

from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Annotated

from msgspec import Meta, Struct

from services.gateway.chat.requests.json_body import check, decode
from services.gateway.http.body import Body
from services.gateway.http.violations import show
from shared.errors import InvalidRequest
from shared.wire.messages import MAX_ADAPTERS

LoraName = Annotated[str, Meta(min_length=1, max_length=256)]
LoraPath = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadRequest(Struct, kw_only=True):
    """``lora_path`` is a folder in the workers' lora-dir, by default ``lora_name``.
    ``is_3d_lora_weight`` changes nothing: files tell their own shapes."""

    lora_name: LoraName
    lora_path: LoraPath | None = None
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None


class UnloadRequest(Struct, kw_only=True):
    """``lora_int_id`` changes nothing: an adapter is known by its name."""

    lora_name: LoraName
    lora_int_id: int | None = None


def parse_load(body: Body, models: Collection[str], adapters: Collection[str]) -> LoadRequest:
    """Raises InvalidRequest. ``models`` and ``adapters`` are names that are served."""
    asked = check(decode(body), LoadRequest, {})
    name = asked.lora_name
    if not name.isprintable():
        raise InvalidRequest(
            f"lora_name is {show(name)}; it must be printable characters", param="lora_name"
        )
    if name in models:
        raise InvalidRequest(f"lora_name is {show(name)}, the model's own name", param="lora_name")
    if name in adapters and not asked.load_inplace:
        raise InvalidRequest(
            f"the LoRA adapter {show(name)} is loaded already; load_inplace true replaces it",
            param="load_inplace",
        )
    if name not in adapters and len(adapters) >= MAX_ADAPTERS:
        raise InvalidRequest(
            f"{len(adapters)} adapters are loaded; the limit is {MAX_ADAPTERS}", param="lora_name"
        )
    asked.lora_path = asked.lora_path if asked.lora_path is not None else name
    _check_path(asked.lora_path)
    return asked


def parse_unload(body: Body) -> UnloadRequest:
    """Raises InvalidRequest."""
    return check(decode(body), UnloadRequest, {})


def _check_path(path: str) -> None:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not path.isprintable():
        raise InvalidRequest(
            f"lora_path is {show(path)}; it must be a folder in lora-dir: relative, printable and"
            " without .. (default: lora_name)",
            param="lora_path",
        )
