"""What a local Hugging Face folder says of its model, without loading it."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.messages import ModelInfo

IDENTIFYING_FILES = ("config.json", "tokenizer.json", "model.safetensors.index.json")
FINGERPRINT_CHARS = 32


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``. Raises ConfigError where the folder holds no model."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model: {folder} is no model folder: it has no config.json")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"model: {path}: {error}") from None


def read_model_info(folder: Path, names: list[str], max_model_len: int | None) -> ModelInfo:
    """The model as the mesh tells of it; ``max_model_len`` None takes what the model was made
    for."""
    config = read_config(folder)
    return ModelInfo(
        names or [folder.resolve().name],
        _fingerprint(folder),
        _integer(config, "vocab_size"),
        _context_length(_integer(config, "max_position_embeddings"), max_model_len),
        int((folder / "config.json").stat().st_mtime),
    )


def _context_length(longest: int, wanted: int | None) -> int:
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"max-model-len: {wanted} is more than the {longest} positions the model was made for"
        )
    return wanted or longest


def _integer(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"model: {key} in config.json is {value!r}; a positive integer is needed")
    return value


def _fingerprint(folder: Path) -> str:
    """Names model and vocabulary: the describing files, and name and size of each weight file."""
    digest = hashlib.sha256()
    for name in IDENTIFYING_FILES:
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:FINGERPRINT_CHARS]
