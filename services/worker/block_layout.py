"""The layout of KV blocks and states that leave a worker: all facts, besides ids, that decide about
their bytes."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from kernels.cpu.build import library_name
from kernels.cpu.library import find_variant
from kernels.delta import LayerStates
from services.worker.backends.native import NativeLM
from services.worker.machine.kv_cache import KVCache
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from shared.errors import ConfigError
from shared.model_folder import read_model_info, weight_files
from shared.settings.worker import WorkerConfig
from shared.wire.messages import EVERY_LAYER

FORMAT = 2  # of the order of bytes in a block
# Settings that change keys and values.
SETTINGS = (
    "load_format",
    "quantization",
    "lm_head_quantization",
    "embedding_quantization",
    "kv_cache_dtype",
    "activation_dtype",
    "max_model_len",
    "block_size",
)


def why_not_copied(settings: WorkerConfig, model: DecoderLM) -> str:
    """The reason that blocks of ``model`` cannot leave this worker, or empty."""
    if model.model.rotary.table.device.type == "cuda":
        return "the worker is on a GPU"
    if settings.num_ranks > 1:
        return f"there is none with {settings.ranks_setting} {settings.num_ranks}"
    return "the model pools" if model.lm_head is None else ""


def facts_of(
    settings: WorkerConfig, folder: Path, dtype: torch.dtype, model: CausalLM, kv_cache: KVCache
) -> dict[str, object]:
    """Of the model of ``folder``, as the backend's ``model`` computes it."""
    return {
        "format": FORMAT,
        "model": read_model_info(folder, [], settings.max_model_len).fingerprint,
        "weights": facts_of_weights(folder),
        "dtype": str(dtype),
        **{name: str(getattr(settings, name)) for name in SETTINGS},
        "layers": [facts_of_layer(layer) for layer in kv_cache.layers],
        "backend": backend_of(model),
    }


def facts_of_weights(folder: Path) -> list[object]:
    """The fingerprint has samples only. A file that is written anew has another time."""
    try:
        files = weight_files(folder)
    except ConfigError:
        return []  # of load-format dummy
    stats = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def facts_of_layer(layer: Iterable[Tensor | None]) -> list[object]:
    return [[str(each.dtype), list(each.shape[1:])] for each in layer if each is not None]


def facts_of_groups(model: DecoderLM) -> list[object]:
    """The windows of the groups of layers, and the group of each layer: layers of different groups
    use the same memory. Empty for one group with all layers."""
    if model.groups == EVERY_LAYER:
        return []
    windows = [each.window for each in model.groups]
    return [windows, [[each.number, each.group] for each in model.cached_layers()]]


def facts_of_states(layers: Sequence[LayerStates]) -> list[object]:
    """The layout of a state."""
    return [facts_of_layer(_of_copies(layer)) for layer in layers]


def _of_copies(layer: LayerStates) -> tuple[Tensor, Tensor]:
    return layer.matrices, layer.columns


def backend_of(model: CausalLM) -> str:
    """With its version, since another one may round in another way."""
    variant = find_variant()
    if isinstance(model, NativeLM) and variant is not None:
        return library_name(variant)
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


def digest_of(
    facts: dict[str, object], groups: Sequence[object] = (), layers: Sequence[LayerStates] = ()
) -> str:
    """``groups`` as by ``facts_of_groups``, ``layers`` with a state."""
    if layers:
        facts = facts | {"states": facts_of_states(layers)}
    if groups:
        facts = facts | {"groups": groups}
    return blake2b(msgspec.json.encode(facts, order="sorted"), digest_size=16).hexdigest()


class BlockMemory:
    """The memory of each block, or state, in ``tensors`` [blocks, ...], one by one."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._rows = [
            tensor.flatten(1).view(torch.uint8).numpy() for tensor in tensors if tensor.numel()
        ]

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return sum(rows.shape[1] for rows in self._rows)

    @property
    def total(self) -> int:
        return sum(rows.nbytes for rows in self._rows)

    def pieces(self, block: int) -> Sequence[memoryview]:
        return [rows[block].data for rows in self._rows]

    def clear(self, block: int) -> None:
        for rows in self._rows:
            rows[block] = 0


class StateMemory(BlockMemory):
    """The memory of each copy of a state, behind the states of ``num_slots``. ``positions`` as in
    ``StatePool``."""

    def __init__(
        self, layers: Sequence[LayerStates], positions: np.ndarray, num_slots: int
    ) -> None:
        super().__init__(chain.from_iterable(map(_of_copies, layers)))
        self._positions = positions
        self._num_slots = num_slots

    def pieces(self, block: int) -> Sequence[memoryview]:
        return super().pieces(self._num_slots + block)

    def clear(self, block: int) -> None:
        super().clear(self._num_slots + block)

    def note(self, copy: int, num_tokens: int) -> None:
        """The copy is of a state that has seen ``num_tokens``."""
        self._positions[self._num_slots + copy] = num_tokens

    def begin(self, slot: int, copy: int, *, is_lost: bool) -> None:
        """Makes the copy that a slot was admitted with its state. The slot has no step with a lost
        one."""
        source, num = self._num_slots + copy, abs(self._positions[slot])
        self._positions[[slot, source]] = (-num, 0) if is_lost else num
        for rows in self._rows:
            rows[slot] = rows[source]
