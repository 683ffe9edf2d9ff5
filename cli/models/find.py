"""Finds model folders."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, EMBEDDED_MODEL
from shared.model_location import FORMATS, ModelLocation, cached_models


def find_models(folders: Sequence[Path]) -> list[ModelLocation]:
    """Models in ``folders``, each of which is a model or contains some; without folders the
    embedded model and the Hugging Face cache. Raises ConfigError."""
    if not folders:
        return [ModelLocation(EMBEDDED_MODEL.name, EMBEDDED_MODEL), *cached_models()]
    return [each for folder in folders for each in _models_in(folder)]


def _models_in(folder: Path) -> Iterator[ModelLocation]:
    if not folder.is_dir():
        raise ConfigError(f"FOLDER: no such folder: {folder}")
    inner = [each for each in sorted(folder.iterdir()) if _is_model(each)]
    for each in [folder] if _is_model(folder) else inner:
        yield ModelLocation(each.resolve().name, each)


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or any(any(folder.glob(f"*{end}")) for end in FORMATS)
