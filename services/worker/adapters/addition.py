"""Adapters as an addition to a model."""

from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs

from kernels.cpu.adapter import adapter_bytes
from services.worker.adapters.device_ops import BankForm, DeviceAdaptingOps
from services.worker.adapters.native_ops import AdaptingRecorder, NativeForm
from services.worker.adapters.sites import Site, find_sites, layer_shapes
from services.worker.adapters.store import AdapterStore
from services.worker.adapters.table import AdapterTable, DeviceTable, HostForm, HostTable
from services.worker.adapters.torch_ops import AdaptingOps, TorchForm
from services.worker.backends.native import NativeLM
from services.worker.backends.operators import Operators
from services.worker.backends.torch_lm import DEVICE, TorchLM
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity

CPU = torch.device("cpu")


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
    return Adapters(settings, find_sites(model), dtype, device, model.parallel)


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
    ) -> None:
        self.sites = sites
        self.dtype = dtype
        self._parallel = parallel
        self._settings = settings
        self._is_on_gpu = device.type == "cuda"
        self._native = NativeForm(settings.max_loras)
        self._torch = TorchForm(sites, settings.max_loras)
        self._bank = BankForm(
            sites,
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
        """On a CPU for ``max-cpu-loras`` adapters of ``max-lora-rank``, for a file of one in
        float32 and its copy, and for the deltas of a step. A GPU's steps are measured."""
        if self._is_on_gpu:
            return {}
        num, rank = self._settings.num_adapters, self._settings.max_lora_rank
        parts = [part for site in self.sites for part in site.parts.values()]
        each = sum(
            adapter_bytes(rank, part.inputs.num, part.outputs.num, self.dtype.itemsize)
            for part in parts
        )
        widest = max(
            (linear.inputs + linear.outputs + len(parts) * rank for linear, parts in self.sites),
            default=0,
        )
        return {
            f"{num} adapters of rank {rank} (max-cpu-loras, max-lora-rank)": num * each,
            "loading an adapter": sum(
                rank * (part.inputs.total + part.outputs.total) for part in parts
            )
            * (torch.float32.itemsize + self.dtype.itemsize),
            "adapters in a step": num_tokens * widest * torch.float32.itemsize,
        }

    def begin(self, model: CausalLM, is_open: np.ndarray, *_: object) -> AdapterTable[Any]:
        """Loads the adapters of the settings. Raises ConfigError."""
        limits = {
            "max_adapters": self._settings.max_loras,
            "max_rank": self._settings.max_lora_rank,
            "dtype": self.dtype,
        }
        if isinstance(model, TorchLM) and model.known is DEVICE:
            self.table = DeviceTable(self.sites, self._bank, is_open, **limits)
        else:
            form: HostForm[Any] = self._native if isinstance(model, NativeLM) else self._torch
            self.table = HostTable(self.sites, form, is_open, **limits)
        shapes = layer_shapes(self.sites)
        self.store = AdapterStore(self._settings, shapes, self.dtype, self.table.add)
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
