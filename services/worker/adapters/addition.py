"""Adapters as an addition to a model."""

from collections.abc import Mapping
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs

from services.worker.adapters.device_ops import BankForm, DeviceAdaptingOps
from services.worker.adapters.folder import FindBase
from services.worker.adapters.memory import AdapterMemory, widest
from services.worker.adapters.native_ops import AdaptingRecorder, NativeForm
from services.worker.adapters.sites import Site, find_sites, layers_of
from services.worker.adapters.store import AdapterStore
from services.worker.adapters.table import AdapterTable, DeviceTable, HostForm, HostTable
from services.worker.adapters.torch_ops import AdaptingOps, TorchForm
from services.worker.backends.native import NativeLM
from services.worker.backends.operators import Operators
from services.worker.backends.torch_lm import DEVICE, TorchLM
from services.worker.config.model_config import ModelConfig
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.weights.checkpoint import (
    Checkpoint,
    StoredTensor,
    open_checkpoint,
    with_our_names,
)
from shared.errors import ConfigError
from shared.model_folder import weight_files
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity

CPU = torch.device("cpu")
TABLE = "model.embed_tokens.weight"
ON_CPUS = "; routed experts, routers, embeddings and output heads are changed on CPUs only"


def check(settings: WorkerConfig, device: torch.device, *, pools: bool, is_ours: bool) -> None:
    """Raises ConfigError."""
    if settings.pipeline_parallel_size > 1:
        raise ConfigError(
            f"enable-lora: adapters are not supported with pipeline-parallel-size"
            f" {settings.pipeline_parallel_size}; set it to 1"
        )
    if pools:
        raise ConfigError("enable-lora: adapters are not supported for a model that pools")
    if not is_ours:
        raise ConfigError(
            "enable-lora: adapters are supported for our own architectures only; transformers"
            " computes this model"
        )


def make(settings: WorkerConfig, folder: Path, model: DecoderLM, dtype: torch.dtype) -> "Adapters":
    device = model.model.rotary.table.device
    if device.type == "cuda" and _reads_images(settings, folder):
        raise ConfigError(
            "enable-lora: adapters are not supported on GPUs for a model that reads images; set"
            " language-model-only"
        )
    base = find_base(settings, folder, model.config)
    return Adapters(settings, find_sites(model), dtype, device, model.parallel, base)


def find_base(settings: WorkerConfig, folder: Path, config: ModelConfig) -> FindBase:
    """The tensors of the base in ``folder``; a tied head is the embedding."""

    @cache
    def opened() -> Checkpoint:
        return with_our_names(open_checkpoint(weight_files(folder)), config)

    def find(name: str) -> StoredTensor | None:
        if settings.load_format == "dummy":
            return None
        return opened().find(name) or (config.tie_word_embeddings and opened().find(TABLE)) or None

    return find


def _reads_images(settings: WorkerConfig, folder: Path) -> bool:
    names = ("preprocessor_config.json", "processor_config.json")
    return settings.reads_media and any((folder / name).exists() for name in names)


class Adapters:
    """The ``sites`` of a model, the ``table`` of the adapters for them, and the ``store`` that
    reads them."""

    table: AdapterTable[Any]
    store: AdapterStore

    def __init__(
        self,
        settings: WorkerConfig,
        sites: list[Site],
        dtype: torch.dtype,
        device: torch.device = CPU,
        parallel: Parallel = ALONE,
        base: FindBase = lambda name: None,
    ) -> None:
        self.sites = sites
        self.dtype = dtype
        self._parallel = parallel
        self._settings = settings
        self._is_on_gpu = device.type == "cuda"
        self._layers = layers_of(sites)
        self._base = base
        self.memory = AdapterMemory(settings, sites, self._layers, dtype)
        self._native = NativeForm(settings.max_loras)
        self._torch = TorchForm(sites, settings.max_loras)
        self._common = [site for site in sites if site.is_common]
        self._bank = BankForm(
            self._common,
            settings.max_num_seqs,
            max_adapters=settings.max_loras,
            max_rank=settings.max_lora_rank,
            dtype=dtype,
            device=device,
        )
        self.operators = Operators(
            partial(AdaptingRecorder, self._native.operators(sites)),
            partial(AdaptingOps, self._torch),
            partial(DeviceAdaptingOps, self._bank),
        )

    def limit(self, capacity: Capacity) -> Capacity:
        return structs.replace(capacity, max_adapters=self._settings.max_loras)

    def num_bytes(self, num_tokens: int) -> Mapping[str, int]:
        """On a CPU; a GPU's steps are measured."""
        if self._is_on_gpu:
            return {}
        num, rank = self._settings.num_adapters, self._settings.max_lora_rank
        purposes = {
            f"{num} adapters of rank {rank} (max-cpu-loras, max-lora-rank)": self.memory.planned,
            "the larger size of adapters of experts, embeddings or heads": self.memory.larger,
            "loading an adapter": self.memory.loading,
            "adapters in a step": num_tokens * widest(self.sites, rank) * torch.float32.itemsize,
        }
        return {purpose: size for purpose, size in purposes.items() if size}

    def begin(self, model: CausalLM, is_open: np.ndarray, *_: object) -> AdapterTable[Any]:
        """Loads the adapters of the settings. Raises ConfigError."""
        limits = {
            "max_adapters": self._settings.max_loras,
            "max_rank": self._settings.max_lora_rank,
            "dtype": self.dtype,
        }
        if isinstance(model, TorchLM) and model.known is DEVICE:
            self.table = DeviceTable(self._common, self._bank, is_open, **limits)
            self._layers = layers_of(self._common)._replace(note=ON_CPUS)
        else:
            form: HostForm[Any] = self._native if isinstance(model, NativeLM) else self._torch
            self.table = table = HostTable(self.sites, form, is_open, **limits)
            model.place_logits = table.lay_out_logits
        self.store = AdapterStore(
            *(self._settings, self._layers, self.dtype, self.memory, self.table.add, self._base)
        )
        self.store.fill()
        self._check_ranks()
        return self.table

    def _check_ranks(self) -> None:
        """Raises ConfigError unless all ranks have the same adapters."""
        digests = sorted(row.digest for row in self.store.rows)
        number = int.from_bytes(blake2b("".join(digests).encode(), digest_size=7).digest())
        if (num := self._parallel.num_alike(number)) < self._parallel.size:
            raise ConfigError(
                f"lora-modules, lora-dir: {num} of {self._parallel.size} ranks have the adapters"
                " of this one; the others have different ones"
            )
