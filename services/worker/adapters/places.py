"""The folders of adapters."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from services.worker.adapters.config import CONFIG
from services.worker.adapters.folder import WEIGHTS
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig

log = logging.getLogger(__name__)


def folders_of(settings: WorkerConfig) -> Iterator[tuple[str, Callable[[], Path]]]:
    """The adapters of ``lora-modules``, then others of ``lora-dir``, by name. Raises
    ConfigError, also when a folder is asked for."""
    of_modules = {module.name: module.path for module in settings.lora_modules}
    for name, path in of_modules.items():
        yield name, partial(Path, path)
    for name in _names(settings.lora_dir):
        if name not in of_modules:
            yield name, partial(folder_in, settings.lora_dir, name)


def _names(directory: Path | None) -> list[str]:
    """The folders in ``lora-dir``. Raises ConfigError."""
    if directory is None:
        return []
    try:
        names = sorted(each.name for each in directory.iterdir() if each.is_dir())
    except OSError as error:
        raise ConfigError(f"lora-dir: {directory}: {error.strerror}") from None
    for name in names:
        if not name.isprintable():
            log.warning("lora-dir: %r is no name of an adapter: it is not printable", name)
    return [name for name in names if name.isprintable()]


def folder_in(directory: Path | None, path: str) -> Path:
    """The folder ``path`` in ``lora-dir``. Raises ConfigError for any other place, also of a file
    in it."""
    if directory is None:
        raise ConfigError("lora-dir is not set, so nothing can be loaded at run time")
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\0" in path:
        raise ConfigError(f"{path!r} is not a relative path in lora-dir")
    folder = directory / path
    try:
        root, *places = (
            each.resolve() for each in (directory, folder, folder / CONFIG, folder / WEIGHTS)
        )
    except (OSError, RuntimeError) as error:  # a loop, a long name
        raise ConfigError(f"{path[:60]!r} cannot be read: {error}") from None
    if not all(each.is_relative_to(root) for each in places):
        raise ConfigError(f"{path!r} leads out of lora-dir")
    return folder
