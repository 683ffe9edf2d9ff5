"""A model on its device, as the settings want it, before there is a cache for its sequences."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from services.worker.config.model_config import ModelConfig
from services.worker.expert_loads import ExpertLoads, has_experts
from services.worker.guides.guides import Guides
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
from services.worker.models.registry import (
    MODELS,
    find_model,
    read_architectures,
    read_model_config,
)
from services.worker.speculation.choose import NO_SPECULATION, Speculation, choose_speculation
from services.worker.speculation.draft_vocab import limit_drafts
from services.worker.startup.cache_codes import CACHE_CODES, choose_cache_dtype
from services.worker.startup.join_ranks import check_split, join_ranks, share_of
from services.worker.startup.model_shape import ModelShape, count_parameters, shape_of
from services.worker.step.pooling import Pooler
from services.worker.step.sampler import Sampler
from services.worker.weights.dummy import make_dummy
from services.worker.weights.homes import GIB
from services.worker.weights.load import build_model, load_model
from services.worker.weights.pooled import make_up_score_head, read_score_head
from services.worker.weights.progress import Progress
from shared.config.worker import WorkerConfig
from shared.errors import ConfigError
from shared.messages import Capacity, ModelInfo
from shared.model_folder import read_eos_ids
from shared.model_location import locate_model
from shared.pooling import read_served_model

log = logging.getLogger(__name__)

Choose = Callable[[DecoderLM | CausalLM, WorkerConfig, torch.dtype], tuple[CausalLM, Sampler]]
FOR_OUR_OWN = " is for our own architectures; transformers computes this model"
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``before`` is the memory that was there before the weights. A model that pools
    has a ``pooler``, and one whose experts' tokens are counted ``expert_loads``. ``ranks`` are all
    that the worker has, ``parallel`` those that this one shares layers with."""

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
    expert_loads: ExpertLoads | None = None

    @property
    def max_num_batched_tokens(self) -> int:
        default = DEFAULT_BATCHED_TOKENS[self.device.type]
        return self.settings.max_num_batched_tokens or default

    @property
    def num_outputs(self) -> int:
        """Of the model for one token: logits, or the numbers of a state."""
        pooling = self.model_info.pooling
        return pooling.size if pooling is not None else self.model_info.vocab_size

    @property
    def max_num_seqs(self) -> int:
        """Each may want a token in every step."""
        return min(self.settings.max_num_seqs, self.max_num_batched_tokens)

    def make_kv_cache(self, num_blocks: int) -> KVCache:
        """Raises ConfigError where the memory does not suffice."""
        size = self.settings.block_size
        try:
            return KVCache(self.shape.kv_layouts, num_blocks, size, self.device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"gpu-memory-utilization: {num_blocks} blocks of {size} tokens do not fit:"
                f" {why_out_of_memory(error)}; lower it, or num-gpu-blocks-override or"
                " kv-cache-memory-bytes"
            ) from None

    def make_guides(self) -> Guides | None:
        """None where nothing is sampled."""
        if not self.parallel.stage.is_last:
            return None
        return Guides(self.folder, self.model_info.vocab_size, self.eos_ids)

    def capacity(self, num_blocks: int, max_num_steps: int = 1) -> Capacity:
        return Capacity(
            num_blocks,
            self.settings.block_size,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.model_info.max_model_len,
            self.model_info.vocab_size,
            self.speculation.num_drafts,
            self.speculation.adapts,
            self.settings.stall_s,
            self.model_info.pooling.size if self.model_info.pooling else 0,
            max_num_steps,
            self.settings.pipeline_parallel_size,
        )


def load(settings: WorkerConfig, progress: Progress, choose: Choose) -> LoadedModel:
    """``choose`` picks what computes the model. ``progress`` gets what loading does and how far it
    is, 0 … 1. Raises ConfigError where model, machine and settings do not go together."""
    location = locate_model(settings.model)
    model_info = read_served_model(
        location.folder, [], settings.max_model_len, settings.runner, settings.pooler_config
    )
    pools = model_info.pooling is not None
    architectures = read_architectures(location.folder, pools)
    by_transformers = _is_for_transformers(settings.model_impl, architectures)
    if pools and by_transformers:
        raise ConfigError(
            f"runner: {'/'.join(architectures)} is computed by transformers, which writes texts"
            f" only; of our own architectures, which pool, there are {', '.join(sorted(MODELS))}"
        )
    if pools and settings.lm_head_quantization != "none":
        raise ConfigError(
            f"lm-head-quantization: {settings.lm_head_quantization}: a model that pools has no"
            " output head"
        )
    device = choose_device(settings.device, settings.gpu_claims)
    config = None
    if not by_transformers:
        config = _read_config(settings, location.folder, model_info)
    cache_dtype = choose_cache_dtype(settings.kv_cache_dtype, config)
    settings = settings.model_copy(update={"kv_cache_dtype": cache_dtype})
    check_split(settings, config)
    dtype = choose_dtype(settings.dtype, device)
    compute_exactly()
    model_info = msgspec.structs.replace(
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
    log.info("model %s (%s) in %s on %s", location.name, "/".join(architectures), dtype, device)
    ranks, parallel = join_ranks(settings, device)
    before = share_of(read_memory(device, settings.numa_node), settings, ranks, device)
    model: DecoderLM | CausalLM
    expert_loads = None
    try:
        if config is None:
            max_len = model_info.max_model_len
            model, shape = _load_transformers(settings, location.folder, dtype, device, max_len)
        else:
            model = _load_ours(
                *(settings, location.folder, config, dtype, device, progress, pools, parallel)
            )
            model.drop_windows(model_info.max_model_len)
            parameters = count_parameters(model)
            log.info("weights: %s%s", parameters, " on this rank" if ranks.size > 1 else "")
            show_parameters(parameters.total, parameters.active)
            is_whole = parallel.stage.num == 1  # else other stages may have all experts
            if settings.enable_expert_distribution_metrics and (is_whole or has_experts(model)):
                expert_loads = ExpertLoads(model, device)
        limit_drafts(settings.speculative_config, model)
        computed, sampler = choose(model, settings, dtype)
        parallel = model.parallel if isinstance(model, DecoderLM) else parallel
    except torch.OutOfMemoryError as error:
        problem = why_out_of_memory(error)
        raise ConfigError(f"model: its weights do not fit on {device}: {problem}") from None
    return_freed_memory()
    speculation = NO_SPECULATION
    if not pools:
        has_head = computed.draft_head is not None or (
            isinstance(model, DecoderLM) and model.has_head_elsewhere
        )
        speculation = choose_speculation(settings.speculative_config, has_head)
    if isinstance(model, DecoderLM):
        codes = CACHE_CODES[settings.kv_cache_dtype]
        drafts = speculation.method == "mtp" and not model.has_head_elsewhere
        shape = shape_of(model, dtype, drafts=drafts, codes=codes)
    return LoadedModel(
        settings,
        location.folder,
        model_info,
        shape,
        computed,
        sampler,
        device,
        dtype,
        speculation,
        np.array(read_eos_ids(location.folder, model_info.vocab_size), np.int64),
        before,
        _pooler(settings, location.folder, model_info, model, computed, device),
        parallel,
        ranks,
        expert_loads,
    )


def _pooler(
    settings: WorkerConfig,
    folder: Path,
    model_info: ModelInfo,
    model: DecoderLM | CausalLM,
    computed: CausalLM,
    device: torch.device,
) -> Pooler | None:
    """Raises ConfigError."""
    pooling = model_info.pooling
    if pooling is None or not isinstance(model, DecoderLM):
        return None
    head, hidden_size = None, model.config.hidden_size
    if pooling.task == "classify" and settings.load_format == "dummy":
        head = make_up_score_head(pooling.size, hidden_size)
    elif pooling.task == "classify":
        tokens = settings.pooler_config.classifier_from_token
        if tokens is not None and model.logits_softcap is not None:
            raise ConfigError(
                "pooler-config: classifier_from_token is not for models whose logits are bent"
                f" (final_logit_softcapping {model.logits_softcap})"
            )
        head = read_score_head(folder, pooling, tokens, hidden_size)
        head = head * (1.0 if tokens is None else model.logits_scale)
    how = f"{pooling.pooling_type} state, {pooling.activation}, {pooling.size} numbers"
    log.info("pooling: %s: %s", pooling.task, how)
    return Pooler(computed.logits, None if head is None else head.to(device))


def _is_for_transformers(wanted: str, architectures: list[str]) -> bool:
    """Logs it where ``auto`` has it so. Raises ConfigError where the architecture has to be ours
    and is not."""
    if wanted == "auto" and architectures and MODELS.keys().isdisjoint(architectures):
        log.info(
            "model-impl: %s is none of our own architectures: transformers computes it, slower and"
            " without MTP drafts",
            "/".join(architectures),
        )
        return True
    if wanted != "transformers":
        find_model(architectures)
    return wanted == "transformers"


def _read_config(settings: WorkerConfig, folder: Path, model_info: ModelInfo) -> ModelConfig:
    """Raises ConfigError, which names transformers where that would compute the model."""
    pools, max_len = model_info.pooling is not None, model_info.max_model_len
    try:
        return read_model_config(folder, pools)
    except ConfigError as error:
        forms = (
            settings.quantization,
            settings.lm_head_quantization,
            settings.embedding_quantization,
        )
        for_our_own = set(forms) != {"none"} or settings.cpu_offload_gb or pools
        if for_our_own or settings.speculative_config.method == "mtp":
            raise
        from services.worker.startup.load_transformers import can_serve

        if not can_serve(folder, max_len):
            raise
        raise ConfigError(f"{error}; or use --model-impl transformers, which is slower") from None


def _load_ours(
    settings: WorkerConfig,
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    pools: bool,
    parallel: Parallel,
) -> DecoderLM:
    codes = CACHE_CODES[settings.kv_cache_dtype]
    # Before anything is read: refuses codes of what cannot be in them.
    build_model(config, dtype, torch.device("meta")).kv_layouts(dtype, drafts=False, codes=codes)
    host_bytes = int(settings.cpu_offload_gb * GIB)
    if settings.load_format == "dummy":
        return make_dummy(
            *(config, dtype, device, settings.quantization, host_bytes),
            head=settings.lm_head_quantization,
            embedding=settings.embedding_quantization,
            pools=pools,
            parallel=parallel,
        )
    return load_model(
        *(folder, config, dtype, device, progress, parallel),
        quantization=settings.quantization,
        cache=settings.quantization_cache,
        host_bytes=host_bytes,
        head=settings.lm_head_quantization,
        embedding=settings.embedding_quantization,
        pools=pools,
    )


def _load_transformers(
    settings: WorkerConfig, folder: Path, dtype: torch.dtype, device: torch.device, max_len: int
) -> tuple[CausalLM, ModelShape]:
    """Imports transformers, which takes seconds, only here."""
    if settings.quantization != "none":
        raise ConfigError(f"quantization: {settings.quantization}{FOR_OUR_OWN}")
    if settings.lm_head_quantization != "none":
        raise ConfigError(f"lm-head-quantization: {settings.lm_head_quantization}{FOR_OUR_OWN}")
    if settings.embedding_quantization != "none":
        raise ConfigError(f"embedding-quantization: {settings.embedding_quantization}{FOR_OUR_OWN}")
    if settings.cpu_offload_gb:
        raise ConfigError(f"cpu-offload-gb: {settings.cpu_offload_gb:g}{FOR_OUR_OWN}")
    if settings.enable_expert_distribution_metrics:
        raise ConfigError(f"enable-expert-distribution-metrics{FOR_OUR_OWN}")
    from services.worker.startup.load_transformers import load_transformers

    codes = CACHE_CODES[settings.kv_cache_dtype]
    is_dummy = settings.load_format == "dummy"
    return load_transformers(folder, dtype, device, max_len, is_dummy, codes)
