"""Adapters of requests, in the shape of vLLM's ``LoRARequest``."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shoal.connection import Request
from shoal.prompts import one_each, type_name

MAX_NAME_CHARS = 200  # a folder has its name


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter ``lora_name``. A mesh of its own loads it from the folder ``lora_path`` at the
    first use; a server has it already. ``lora_int_id`` has no meaning here."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


ManyAdapters = LoRARequest | Sequence[LoRARequest | None] | None


class OwnAdapters:
    """The adapters that a mesh of its own was given. ``settings`` are those of the mesh."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="shoal-adapters-")
        self._paths: dict[str, str] = {}
        self.settings: dict[str, Any] = {
            "lora_dir": self._folder.name,
            "allow_runtime_lora_updating": True,
        }

    def close(self) -> None:
        self._folder.cleanup()

    def load(self, adapters: Sequence[LoRARequest], ask: Callable[[list[Request]], object]) -> None:
        """Copies the new ones to the folder of the mesh, and has them loaded. Raises ValueError."""
        for each in adapters:
            name, path = each.lora_name, each.lora_path
            if not path or self._paths.get(name) == path:
                continue
            if name in self._paths:
                raise ValueError(f"lora_request: {name} is the adapter in {self._paths[name]}")
            if not Path(path).is_dir():
                raise ValueError(f"lora_request: lora_path {path} is no folder")
            if not 0 < len(name) <= MAX_NAME_CHARS or "/" in name or name in (".", ".."):
                raise ValueError(f"lora_request: lora_name {name!r} is no name of a folder")
            # It stays there for a worker that starts later.
            shutil.copytree(path, Path(self._folder.name, name), dirs_exist_ok=True)
            ask([Request("/v1/load_lora_adapter", {"lora_name": name}, "lora_request")])
            self._paths[name] = path


def read_adapters(given: ManyAdapters, num: int) -> list[LoRARequest | None]:
    """One for each of ``num`` prompts. Raises TypeError, ValueError."""
    adapters = one_each(given, num, "lora_request")
    for each in adapters:
        if each is not None and not isinstance(each, LoRARequest):
            raise TypeError(f"lora_request: expected LoRARequest, not {type_name(each)}")
    return adapters
