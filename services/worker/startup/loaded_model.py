"""A model on its device, as the settings want it, before there is a cache for its sequences."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
from prometheus_client.registry import Collector

from services.worker.backends.operators import Operators
from services.worker.layers.experts import has_experts
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.machine.hardware import (
    Memory,
    choose_device,
    choose_dtype,
    compute_exactly,
    read_memory,
    return_freed_memory,
    why_out_of_memory,
)
from services.worker.machine.kv_cache import KVCache
from services.worker.metrics import show_parameters
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_architectures
from services.worker.slots.guide import Guides
from services.worker.speculation.choose import NO_SPECULATION, Speculation, choose_speculation
from services.worker.speculation.draft_vocab import limit_drafts
from services.worker.startup.additions import (
    Addition,
    addition_modules,
    make_additions,
    operators_of,
)
from services.worker.startup.cache_codes import CACHE_CODES, choose_cache_dtype
from services.worker.startup.implementations import PARTS, count_loads, make_pooler, open_drafts
from services.worker.startup.load_weights import load_ours, load_theirs
from services.worker.startup.model_shape import (
    ModelShape,
    count_parameters,
    place_layers,
    shape_of,
)
from services.worker.startup.native_config import find_native_config
from services.worker.startup.ranks import Joined, ranks_of, share_of
from services.worker.step.parts import Pooler
from services.worker.step.sampler import Sampler
from services.worker.weights.progress import Progress
from shared.errors import ConfigError
from shared.model_folder import read_eos_ids
from shared.model_location import locate_model
from shared.pooling import read_served_model
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity, ModelInfo

log = logging.getLogger(__name__)
Choose = Callable[
    [DecoderLM | CausalLM, WorkerConfig, torch.dtype, Operators], tuple[CausalLM, Sampler]
]
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``before`` is the memory before the weights were loaded. A model that pools has a
    ``pooler``, and a model with counts of its experts' tokens has ``expert_loads``. ``ranks`` are
    all ranks of the worker, ``parallel`` the ranks that share layers with this one."""

    settings: WorkerConfig
    folder: Path
    model_info: ModelInfo
    shape: ModelShape
    model: CausalLM
    sampler: Sampler
    device: torch.device
    dtype: torch.dtype
    speculation: Speculation
    eos_ids: np.ndarray  # [E] int64
    before: Memory
    pooler: Pooler | None
    parallel: Parallel = ALONE
    ranks: Parallel = ALONE
    expert_loads: Collector | None = None
    additions: Sequence[Addition] = ()

    @property
    def max_num_batched_tokens(self) -> int:
        return self.limits.max_num_batched_tokens

    @property
    def returns_processed(self) -> bool:
        """Logprobs are of what tokens are drawn from."""
        return self.settings.logprobs_mode == "processed_logprobs"

    @property
    def num_outputs(self) -> int:
        """The model's outputs for one token: logits, or the elements of a state."""
        pooling = self.model_info.pooling
        return pooling.size if pooling is not None else self.model_info.vocab_size

    @property
    def max_num_seqs(self) -> int:
        return self.limits.max_num_seqs

    def make_kv_cache(self, num_blocks: int) -> KVCache:
        """Raises ConfigError if the memory does not suffice."""
        size, shape = self.settings.block_size, self.shape
        try:
            return KVCache(shape.kv_layouts, num_blocks, size, self.device, shape.layer_groups)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"gpu-memory-utilization: {num_blocks} blocks of {size} tokens do not fit:"
                f" {why_out_of_memory(error)}; lower it, or num-gpu-blocks-override or"
                " kv-cache-memory-bytes"
            ) from None

    def make_guides(self) -> Guides | None:
        """None if nothing is sampled, or grammars are not installed."""
        if not self.parallel.stage.is_last or "guides" not in PARTS:
            return None
        make = import_module(PARTS["guides"]).Guides
        return cast(Guides, make(self.folder, self.model_info.vocab_size, self.eos_ids))

    @property
    def limits(self) -> Capacity:
        """Its capacity before there are blocks and copies of states."""
        found = capacity_of(self.settings, self.model_info, self.device, self.speculation)
        num_states = 0 if self.shape.state_specs else None
        found = msgspec.structs.replace(found, groups=self.shape.groups, num_states=num_states)
        for addition in self.additions:
            found = addition.limit(found)
        return found


def batched_tokens(settings: WorkerConfig, device_type: str) -> int:
    """Unset: each sequence can have a token in every step."""
    default = max(DEFAULT_BATCHED_TOKENS[device_type], settings.max_num_seqs)
    return settings.max_num_batched_tokens or default


def capacity_of(
    settings: WorkerConfig, model_info: ModelInfo, device: torch.device, speculation: Speculation
) -> Capacity:
    """Without blocks, and with one group of layers."""
    max_tokens = batched_tokens(settings, device.type)
    return Capacity(
        num_blocks=0,
        block_size=settings.block_size,
        max_num_seqs=min(settings.max_num_seqs, max_tokens),
        max_num_batched_tokens=max_tokens,
        max_model_len=model_info.max_model_len,
        vocab_size=model_info.vocab_size,
        num_speculative_tokens=speculation.num_drafts,
        adapts_depth=speculation.adapts,
        stall_s=settings.stall_s,
        pooled_size=model_info.pooling.size if model_info.pooling else 0,
        num_stages=settings.pipeline_parallel_size,
    )


def load(settings: WorkerConfig, progress: Progress, choose: Choose) -> LoadedModel:
    """``choose`` picks the backend. ``progress`` gets the current work of loading and its progress,
    0 … 1. Raises ConfigError if model, machine and settings do not match."""
    location = locate_model(settings.model)
    folder = location.folder
    model_info = read_served_model(
        folder, [], settings.max_model_len, settings.runner, settings.pooler_config
    )
    pools = model_info.pooling is not None
    architectures = read_architectures(folder, pools)
    config = find_native_config(settings, folder, model_info, architectures)
    device = choose_device(settings.device, settings.gpu_claims)
    cache_dtype = choose_cache_dtype(settings.kv_cache_dtype, config)
    settings = settings.model_copy(update={"kv_cache_dtype": cache_dtype})
    others = ranks_of(settings)
    if others is not None:
        others.check_split(settings, config)
    dtype = choose_dtype(settings.dtype, device)
    drafts = None if pools else open_drafts(settings, config, device)
    added = list(addition_modules(settings))
    for module in added:
        module.check(settings, device, pools=pools, is_ours=config is not None)
    compute_exactly()
    model_info = _described(model_info, settings, dtype)
    log.info("model %s (%s) in %s on %s", location.name, "/".join(architectures), dtype, device)
    alone = Joined(ALONE, ALONE)
    ranks, parallel = alone if others is None else others.join_ranks(settings, device)
    before = share_of(read_memory(device, settings.numa_node), settings, ranks, device)
    model: DecoderLM | CausalLM
    expert_loads = None
    additions: list[Addition] = []
    try:
        if config is None:
            speculation = _speculation(settings, pools, has_head=False)
            capacity = capacity_of(settings, model_info, device, speculation)
            model, shape = load_theirs(settings, folder, dtype, device, capacity)
        else:
            model = load_ours(settings, folder, config, dtype, device, progress, pools, parallel)
            if drafts is not None:
                drafts.add_to(model, dtype, device, progress)
            has_head = model.mtp_head is not None or model.has_head_elsewhere
            speculation = _speculation(settings, pools, has_head)
            capacity = capacity_of(settings, model_info, device, speculation)
            place_layers(model, capacity, drafts=speculation.method == "mtp")
            _show_parameters(model, ranks)
            is_whole = parallel.stage.num == 1  # else other stages may have all experts
            if settings.enable_expert_distribution_metrics and (is_whole or has_experts(model)):
                expert_loads = count_loads(model, device)
            additions = make_additions(added, settings, folder, model, dtype)
        limit_drafts(settings.speculative_config, model)
        computed, sampler = choose(model, settings, dtype, operators_of(additions))
        parallel = model.parallel if isinstance(model, DecoderLM) else parallel
    except torch.OutOfMemoryError as error:
        problem = why_out_of_memory(error)
        raise ConfigError(f"model: its weights do not fit on {device}: {problem}") from None
    return_freed_memory()
    if isinstance(model, DecoderLM):
        codes = CACHE_CODES[settings.kv_cache_dtype]
        has_drafts = speculation.method == "mtp" and not model.has_head_elsewhere
        shape = shape_of(model, dtype, drafts=has_drafts, codes=codes)
    return LoadedModel(
        settings=settings,
        folder=folder,
        model_info=model_info,
        shape=shape,
        model=computed,
        sampler=sampler,
        device=device,
        dtype=dtype,
        speculation=speculation,
        eos_ids=np.array(read_eos_ids(folder, model_info.vocab_size), np.int64),
        before=before,
        pooler=make_pooler(settings, folder, model_info, model, computed, device),
        parallel=parallel,
        ranks=ranks,
        expert_loads=expert_loads,
        additions=additions,
    )


def _speculation(settings: WorkerConfig, pools: bool, has_head: bool) -> Speculation:
    return NO_SPECULATION if pools else choose_speculation(settings.speculative_config, has_head)


def _described(model_info: ModelInfo, settings: WorkerConfig, dtype: torch.dtype) -> ModelInfo:
    """``model_info`` with the effects of the settings."""
    cache_dtype = settings.kv_cache_dtype
    return msgspec.structs.replace(
        model_info,
        dtype=str(dtype).removeprefix("torch."),
        load_format="dummy" if settings.load_format == "dummy" else "safetensors",
        logprobs_mode=settings.logprobs_mode,
        quantization=settings.quantization,
        lm_head_quantization=settings.lm_head_quantization,
        embedding_quantization=settings.embedding_quantization,
        kv_cache_dtype="auto" if cache_dtype == "none" else cache_dtype,
        activation_dtype=settings.activation_dtype,
    )


def _show_parameters(model: DecoderLM, ranks: Parallel) -> None:
    """Shows them in the log and in the metrics."""
    parameters = count_parameters(model)
    log.info("weights: %s%s", parameters, " on this rank" if ranks.size > 1 else "")
    show_parameters(parameters.total, parameters.active)
