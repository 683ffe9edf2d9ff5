"""The adapters of a worker, and the folders they are read from."""

import logging
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import torch
from msgspec.structs import replace

from services.worker.adapters.folder import CONFIG, WEIGHTS, Shapes, read_adapter
from services.worker.adapters.sites import LoadedAdapter
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import MAX_REASON_CHARS, Adapter, LoadAdapter

log = logging.getLogger(__name__)

MAX_PROBLEMS = 16  # refused orders that are still reported


class AdapterStore:
    """Reads adapters and reports them as ``rows``, oldest first; an adapter is given to ``add``
    before it has a row. Only one thread may call the methods at a time; ``rows`` is for any."""

    def __init__(
        self,
        settings: WorkerConfig,
        shapes: Shapes,
        dtype: torch.dtype,
        add: Callable[[LoadedAdapter], None],
    ) -> None:
        self.rows: tuple[Adapter, ...] = ()
        self._settings = settings
        self._shapes = shapes
        self._dtype = dtype
        self._add = add

    def fill(self) -> None:
        """Loads the adapters of the settings. Raises ConfigError for one in ``lora-modules``; one
        in ``lora-dir`` is reported and left out."""
        for module in self._settings.lora_modules:
            try:
                self._load(module.name, module.path, Adapter(name=module.name))
            except ConfigError as error:
                raise ConfigError(f"lora-modules: {module.name}: {error}") from None
        for name in self._names():
            row = Adapter(name=name)
            if any(each.name == name for each in self.rows):
                continue
            self._load_or_refuse(row, name)

    def load(self, order: LoadAdapter) -> None:
        """Adds a row with the outcome of ``order``, unless there is one."""
        if any(row.load == order.load for row in self.rows):
            return
        self._load_or_refuse(row_of(order), order.path)

    def refuse(self, order: LoadAdapter, problem: str) -> None:
        self._refuse(row_of(order), problem)

    def forget(self, row: Adapter) -> None:
        self.rows = tuple(each for each in self.rows if each != row)

    def _names(self) -> list[str]:
        """The folders in ``lora-dir``. Raises ConfigError."""
        directory = self._settings.lora_dir
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

    def _folder_of(self, path: str) -> Path:
        """The folder ``path`` in ``lora-dir``. Raises ConfigError for any other place, also of a
        file in it."""
        directory = self._settings.lora_dir
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

    def _load_or_refuse(self, row: Adapter, path: str) -> None:
        """An unforeseen error refuses the adapter too: it would recur in each worker."""
        try:
            self._load(row.name, self._folder_of(path), row)
        except ConfigError as error:
            self._refuse(row, str(error))
        except Exception:
            log.exception("adapter %s cannot be loaded", row.name)
            self._refuse(row, "it cannot be loaded; the worker's log has the reason")

    def _load(self, name: str, folder: Path, row: Adapter) -> None:
        started_s = time.monotonic()
        max_rank = self._settings.max_lora_rank
        try:
            adapter = read_adapter(name, folder, self._shapes, self._dtype, max_rank)
        except OSError as error:
            raise ConfigError(f"{folder.name[:60]} cannot be read: {error.strerror}") from None
        others = tuple(each for each in self.rows if each.digest != adapter.digest)
        self._check_room(adapter, sum(each.num_bytes for each in others))
        self._add(adapter)
        self.rows = (
            *others,
            replace(
                row,
                digest=adapter.digest,
                rank=adapter.rank,
                num_bytes=adapter.num_bytes,
                loaded_s=time.time(),
            ),
        )
        log.info(
            "adapter %s: rank %d, %d layers, %.1f MiB, digest %s, loaded in %.2f s",
            *(name, adapter.rank, len(adapter.layers), adapter.num_bytes / (1 << 20)),
            *(adapter.digest, time.monotonic() - started_s),
        )

    def _check_room(self, adapter: LoadedAdapter, num_taken: int) -> None:
        settings, itemsize = self._settings, self._dtype.itemsize
        numbers = settings.max_lora_rank * sum(map(sum, self._shapes.values()))
        room = settings.num_adapters * numbers * itemsize
        if num_taken + adapter.num_bytes > room:
            raise ConfigError(
                f"max-cpu-loras: {settings.num_adapters} of rank {settings.max_lora_rank} are"
                f" {room} bytes of memory, {num_taken} of which are taken, and this adapter has"
                f" {adapter.num_bytes}; unload another one"
            )

    def _refuse(self, row: Adapter, problem: str) -> None:
        log.warning("adapter %s is refused: %s", row.name, problem)
        self.rows = with_problem(self.rows, row, problem)


def row_of(order: LoadAdapter) -> Adapter:
    return Adapter(name=order.name, path=order.path, load=order.load)


def with_problem(rows: tuple[Adapter, ...], row: Adapter, problem: str) -> tuple[Adapter, ...]:
    """``rows`` and a refused one, of which only the latest are kept."""
    good = (each for each in rows if not each.problem)
    others = [each for each in rows if each.problem][1 - MAX_PROBLEMS :]
    return *good, *others, replace(row, problem=problem[:MAX_REASON_CHARS])
