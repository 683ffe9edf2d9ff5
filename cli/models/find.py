"""Finds model folders."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, EMBEDDED_MODEL
from shared.model_location import ModelLocation, cached_models

WEIGHTS = "*.safetensors"


def find_models(folders: Sequence[Path]) -> list[ModelLocation]:
    """Models in ``folders``, each of which is a model or contains some; without folders the
    embedded model and the Hugging Face cache. Raises ConfigError."""
    if not folders:
        return [ModelLocation(EMBEDDED_MODEL.name, EMBEDDED_MODEL), *cached_models()]
    return [each for folder in folders for each in _models_in(folder)]


def _models_in(folder: Path) -> Iterator[ModelLocation]:
    if not folder.is_dir():
        raise ConfigError(f"FOLDER: no such folder: {folder}")
    inner = [each for each in sorted(folder.iterdir()) if (each / CONFIG_FILE).is_file()]
    for each in [folder] if (folder / CONFIG_FILE).is_file() else inner:
        yield ModelLocation(each.resolve().name, each)


def num_bytes(folder: Path) -> int:
    """Size of the weights, following a cache's links."""
    return sum(each.stat().st_size for each in folder.glob(WEIGHTS) if each.exists())
