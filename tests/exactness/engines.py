"""Engines of a column, in this process or in two others, kept between plays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.harness.engines import make_engine
from shared.model_folder import TOKENIZER_FILE
from tests.exactness.checkpoints import digests_of, save_adapters
from tests.exactness.columns import Column
from tests.exactness.mesh import Engine
from tests.exactness.processes import SharedEngine
from tests.exactness.scenario import SPECULATION

MAX_MODEL_LEN = 128


class ColumnEngines:
    """Engines of ``column`` with drafts by ``speculation``."""

    def __init__(self, column: Column, speculation: str, folder: Path, directory: Path) -> None:
        """``folder`` is the model's; processes meet in ``directory``."""
        self._column = column
        self._folder = folder
        self._directory = directory
        self._settings: Mapping[str, Any] = {
            "dtype": column.dtype,
            "max_model_len": MAX_MODEL_LEN,
            "speculative_config": SPECULATION[speculation],
            **column.settings,
        }
        self.adapters: tuple[str, ...] = ()
        if column.is_adapted:
            modules = save_adapters(directory / "adapters", folder)
            self._settings = {**self._settings, "lora_modules": modules}
            self.adapters = digests_of(folder, modules)
        self._idle: list[Engine] = []
        self.decode = Tokenizer.from_file(str(self._folder / TOKENIZER_FILE)).decode

    def take(self) -> Engine:
        """Raises ConfigError where the column refuses the settings."""
        return self._idle.pop() if self._idle else self._make()

    def give_back(self, engine: Engine) -> None:
        engine.reset()
        self._idle.append(engine)

    def drop(self, engine: Engine) -> None:
        self._idle.append(engine)
        self.close()

    def close(self) -> None:
        """Ends all: the next one that is taken is a new one."""
        for engine in self._idle:
            if isinstance(engine, SharedEngine):
                engine.kill()
        self._idle.clear()

    def _make(self) -> Engine:
        column = self._column
        if column.processes != "one":
            return SharedEngine(
                self._folder, column.kernels, self._settings, column.processes, self._directory
            )
        engine: Engine = make_engine(self._folder, column.kernels, **self._settings)
        return engine
