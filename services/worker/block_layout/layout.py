"""The layout of KV blocks and states that leave a worker: all facts, besides ids, that decide about
their bytes."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kernels.cpu.build import library_name
from kernels.cpu.library import find_variant
from kernels.delta import LayerStates
from services.worker.backends.native import NativeLM
from services.worker.machine.hardware import gpu_name
from services.worker.machine.kv_cache import KVCache
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from shared.model_folder import facts_of_weights, read_model_info
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
    if settings.num_ranks > 1:
        return f"there is none with {settings.ranks_setting} {settings.num_ranks}"
    return "the model pools" if model.lm_head is None else ""


def is_on_gpu(model: DecoderLM) -> bool:
    return model.model.rotary.table.device.type == "cuda"


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
        "backend": backend_on_gpu() if kv_cache.device.type == "cuda" else backend_of(model),
    }


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
    return [facts_of_layer(parts_of(layer)) for layer in layers]


def parts_of(layer: LayerStates) -> tuple[Tensor, Tensor]:
    return layer.matrices, layer.columns


def backend_of(model: CausalLM) -> str:
    """With its version, since another one may round in another way."""
    variant = find_variant()
    if isinstance(model, NativeLM) and variant is not None:
        return library_name(variant)
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


def backend_on_gpu() -> str:
    """Its kernels differ by GPU."""
    return f"torch {torch.__version__} triton {version('triton')} {gpu_name()}"


def digest_of(
    facts: dict[str, object], groups: Sequence[object] = (), layers: Sequence[LayerStates] = ()
) -> str:
    """``groups`` as by ``facts_of_groups``, ``layers`` with a state."""
    if layers:
        facts = facts | {"states": facts_of_states(layers)}
    if groups:
        facts = facts | {"groups": groups}
    return blake2b(msgspec.json.encode(facts, order="sorted"), digest_size=16).hexdigest()
