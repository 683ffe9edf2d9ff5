"""Optional modules of a worker: implementations of models besides our own, by their names in
``model-impl``, additions to our own models (``additions.py``), by the settings that turn them on,
draft models, by their methods, engines besides the host's, and further parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch
from prometheus_client.registry import Collector

from services.worker.config.model_config import ModelConfig
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.startup.model_shape import ModelShape
from services.worker.step.parts import Pooler
from services.worker.weights.progress import Progress
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity, ModelInfo

MODULES = {
    "encoders": "services.worker.encoders.load",
    "transformers": "services.worker.foreign.backend",
}
DRAFT_MODELS: dict[str, str] = {
    "eagle3": "services.worker.eagle.load",
    "mtp": "services.worker.gemma4.assistant.load",
}
ENGINES: dict[str, str] = {
    "device": "services.worker.engine.device.engine",
    "stages": "services.worker.ranks.stages",
}
PARTS: dict[str, str] = {
    "guides": "services.worker.guides.guides",
    "loads": "services.worker.expert_loads.loads",
    "pooling": "services.worker.pooling.load",
    "ranks": "services.worker.ranks.join_ranks",
}
ADDITIONS: dict[str, str] = {
    "has_adapters": "services.worker.adapters.addition",
    "reads_media": "services.worker.media.addition",
    "kv_transfer": "services.worker.moves.addition",  # before stores, which save taken blocks
    "kv_offloading_size": "services.worker.stores.addition",
}


class Implementation(Protocol):
    """A module that loads models of architectures that are not ours."""

    def load(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        capacity: Capacity,
        is_dummy: bool,
        codes: torch.dtype | None,
    ) -> tuple[CausalLM, ModelShape]:
        """``capacity`` has no blocks yet. Raises ConfigError."""

    def can_serve(self, folder: Path, max_model_len: int) -> bool:
        """Judges by shapes: no weight is read or made."""


class DraftModel(Protocol):
    """A model in a folder of its own that drafts for another. It is open, and nothing is read."""

    def add_to(
        self, model: DecoderLM, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        """Makes it the MTP head of ``model``, which is loaded; on the device ``meta`` nothing is
        read. Raises ConfigError."""


def open_drafts(
    settings: WorkerConfig, config: ModelConfig | None, device: torch.device
) -> DraftModel | None:
    """The draft model of the settings for the model of ``config``, which is None if transformers
    computes it. Raises ConfigError if they do not match."""
    wanted = settings.speculative_config
    if wanted.model is None:
        return None
    module = DRAFT_MODELS.get(str(wanted.method))
    if module is None:
        raise ConfigError(
            f"speculative-config: method {wanted.method} is not a part of this installation"
        )
    return cast(DraftModel | None, import_module(module).open_drafts(settings, config, device))


def implementation(name: str) -> Implementation | None:
    """None if it is not a part of this installation. Its import may take seconds."""
    module = MODULES.get(name)
    return None if module is None else cast(Implementation, import_module(module))


def count_loads(model: DecoderLM, device: torch.device) -> Collector:
    """Counts the tokens of the experts of ``model``. Raises ConfigError if it has none."""
    if "loads" not in PARTS:
        setting = "enable-expert-distribution-metrics"
        raise ConfigError(f"{setting}: loads of experts are not a part of this installation")
    return cast(Collector, import_module(PARTS["loads"]).ExpertLoads(model, device))


def make_pooler(
    settings: WorkerConfig,
    folder: Path,
    model_info: ModelInfo,
    model: DecoderLM | CausalLM,
    computed: CausalLM,
    device: torch.device,
) -> Pooler | None:
    """None for a model that generates. Raises ConfigError."""
    if (pooling := model_info.pooling) is None:
        return None
    make = import_module(PARTS["pooling"]).make_pooler
    return cast(Pooler, make(settings, folder, pooling, model, computed, device))


@contextmanager
def errors_as_config_errors() -> Iterator[None]:
    """Converts the many errors of transformers for a wrong or unsupported folder."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(f"model: transformers cannot serve it: {error}") from error
