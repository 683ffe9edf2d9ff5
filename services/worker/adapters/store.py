"""The adapters of a worker, and the folders they are read from."""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace

from services.worker.adapters.folder import AdapterFolder, FindBase
from services.worker.adapters.memory import AdapterMemory
from services.worker.adapters.places import folder_in, folders_of
from services.worker.adapters.sites import Layers, LoadedAdapter
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
        layers: Layers,
        dtype: torch.dtype,
        memory: AdapterMemory,
        add: Callable[[LoadedAdapter], None],
        find_base: FindBase,
    ) -> None:
        self.rows: tuple[Adapter, ...] = ()
        self._settings = settings
        self._layers = layers
        self._dtype = dtype
        self._memory = memory
        self._add = add
        self._find_base = find_base

    def fill(self) -> None:
        """Loads the adapters of the settings. Raises ConfigError for one in ``lora-modules``; one
        in ``lora-dir`` is reported and left out."""
        of_modules = {module.name for module in self._settings.lora_modules}
        for name, folder in folders_of(self._settings):
            if name not in of_modules:
                self._load_or_refuse(Adapter(name=name), folder)
                continue
            try:
                self._load(name, folder(), Adapter(name=name))
            except ConfigError as error:
                raise ConfigError(f"lora-modules: {name}: {error}") from None

    def load(self, order: LoadAdapter) -> None:
        """Adds a row with the outcome of ``order``, unless there is one."""
        if any(row.load == order.load for row in self.rows):
            return
        folder = partial(folder_in, self._settings.lora_dir, order.path)
        self._load_or_refuse(row_of(order), folder)

    def refuse(self, order: LoadAdapter, problem: str) -> None:
        self._refuse(row_of(order), problem)

    def forget(self, row: Adapter) -> None:
        self.rows = tuple(each for each in self.rows if each != row)

    def _load_or_refuse(self, row: Adapter, folder: Callable[[], Path]) -> None:
        """An unforeseen error refuses the adapter too: it would recur in each worker."""
        try:
            self._load(row.name, folder(), row)
        except ConfigError as error:
            self._refuse(row, str(error))
        except Exception:
            log.exception("adapter %s cannot be loaded", row.name)
            self._refuse(row, "it cannot be loaded; the worker's log has the reason")

    def _load(self, name: str, folder: Path, row: Adapter) -> None:
        started_s = time.monotonic()
        try:
            found = AdapterFolder(name, folder, self._layers, self._settings.max_lora_rank)
            measured = found.measure(self._dtype)
            size = self._memory.size(measured.ranks)
            # One of its name may have its bytes, and is then replaced.
            staying = [each for each in self.rows if (each.name, each.num_bytes) != (name, size)]
            self._check_room(self._memory.needed(measured), staying)
            adapter = found.read(self._dtype, self._find_base)._replace(num_bytes=size)
        except OSError as error:
            raise ConfigError(f"{folder.name[:60]} cannot be read: {error.strerror}") from None
        others = tuple(each for each in self.rows if each.digest != adapter.digest)
        self._check_room(size, others)
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

    def _check_room(self, num_bytes: int, others: Iterable[Adapter]) -> None:
        room, taken = self._memory.room, sum(each.num_bytes for each in others)
        if taken + num_bytes > room:
            raise ConfigError(
                f"max-cpu-loras: {self._settings.num_adapters} of rank"
                f" {self._settings.max_lora_rank} are {room} bytes of memory, {taken} of which are"
                f" taken, and this adapter needs {num_bytes}; raise it, or unload another one"
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
