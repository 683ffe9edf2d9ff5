"""The model as it is served: it generates text, or it pools, if that is installed."""

from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from shared.errors import ConfigError
from shared.model_folder import read_model_info
from shared.settings.pooler import PoolerConfig, RunnerSetting
from shared.wire.messages import ModelInfo, PoolingInfo

# The module that reads the pooling of a model from its folder.
FOLDERS: list[str] = [
    "shared.pooled.folder",
]


def read_served_model(
    folder: Path,
    names: list[str],
    max_model_len: int | None,
    runner: RunnerSetting = "auto",
    pooler: PoolerConfig = PoolerConfig(),  # noqa: B008, it is frozen
) -> ModelInfo:
    """The result of ``read_model_info``, and ``pooling`` if the model pools instead of generating.
    Raises ConfigError."""
    pooling = read_pooling(folder, runner, pooler)
    if pooling is not None and max_model_len is None:
        max_model_len = _folders().max_length(folder)
    model = read_model_info(folder, names, max_model_len)
    return replace(model, runner="pooling" if pooling else "generate", pooling=pooling)


def read_pooling(folder: Path, runner: RunnerSetting, pooler: PoolerConfig) -> PoolingInfo | None:
    """None for a model that generates. Raises ConfigError naming an unsupported option."""
    if FOLDERS:
        pooling: PoolingInfo | None = _folders().read_pooling(folder, runner, pooler)
        return pooling
    if runner == "pooling" or pooler:
        raise ConfigError("runner: pooling is not a part of this installation")
    return None


def encodes(architectures: list[str] | None) -> bool:
    """The architecture is an encoder, which can only pool."""
    return bool(FOLDERS) and bool(_folders().encodes(architectures))


def _folders() -> Any:
    return import_module(FOLDERS[0])
