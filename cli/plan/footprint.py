"""The memory of a model, from its config alone: by the worker's own sums, with parameters that have
shapes and no memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from cli.models.found import WEIGHTS
from services.worker.backends.torch_lm import HOST, TorchLM
from services.worker.layers.embedding import TokenRows
from services.worker.layers.experts import Experts
from services.worker.layers.linear import Linear
from services.worker.layers.weights import Dense
from services.worker.machine.hardware import Memory, choose_dtype
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_architectures, read_model_config
from services.worker.speculation.choose import choose_speculation
from services.worker.speculation.draft_vocab import limit_drafts
from services.worker.startup.additions import addition_modules, make_additions
from services.worker.startup.cache_codes import CACHE_CODES, choose_cache_dtype
from services.worker.startup.implementations import implementation, open_drafts
from services.worker.startup.loaded_model import LoadedModel, capacity_of
from services.worker.startup.model_shape import (
    ParameterCount,
    count_parameters,
    place_layers,
    shape_of,
)
from services.worker.startup.plan_memory import (
    MemoryRequirements,
    estimate_requirements,
    rule_bytes,
)
from services.worker.step.sampler import TorchSampler
from services.worker.weights.checkpoint import open_checkpoint
from services.worker.weights.load import build_model
from services.worker.weights.mtp_layouts import with_mtp_head, without_missing_head
from services.worker.weights.online import ONLINE, Forms, Quantization
from services.worker.weights.schemes import find_scheme
from shared.errors import ConfigError
from shared.model_folder import weight_files
from shared.model_location import locate_model
from shared.pooling import encodes, read_served_model
from shared.settings.worker import WorkerConfig

ROWS = 128  # quantized to measure their size: the most rows that share a scale
META = torch.device("meta")
InForm = Linear | TokenRows


@dataclass(frozen=True)
class Footprint:
    """Bytes. A step always reads the ``always`` part of the weights, and of the ``routed`` part the
    experts that its tokens choose: each ``chosen`` of ``experts``."""

    parameters: ParameterCount
    requirements: MemoryRequirements
    kv_per_token: int
    always: int
    routed: int = 0
    chosen: int = 0
    experts: int = 0
    rules: int = 0  # on GPUs: tables of logits rules of the requests in slots

    @property
    def on_gpu(self) -> MemoryRequirements:
        return replace(self.requirements, peak=self.requirements.peak + self.rules)

    def read_by(self, num_tokens: int) -> float:
        """The bytes of weights, on average, if tokens choose their experts independently."""
        if not self.experts:
            return self.always
        missed = (1 - self.chosen / self.experts) ** num_tokens
        return self.always + self.routed * (1 - missed)


def footprint_of(settings: WorkerConfig, device: torch.device) -> Footprint:
    """Raises ConfigError if the architecture is not one of ours, or if its weights are quantized
    and not available for inspection."""
    folder = locate_model(settings.model).folder
    info = read_served_model(
        folder, [], settings.max_model_len, settings.runner, settings.pooler_config
    )
    dtype = choose_dtype(settings.dtype, device)
    is_encoder = info.pooling is not None and encodes(read_architectures(folder))
    if is_encoder and (theirs := cast(Any, implementation("encoders"))):
        parameters, needs = theirs.requirements_of(settings, folder, info, dtype, device)
        return Footprint(parameters, needs, kv_per_token=0, always=needs.weights)
    model = _build(folder, dtype, pools=info.pooling is not None)
    forms = Forms(
        settings.quantization, settings.lm_head_quantization, settings.embedding_quantization
    ).tied(model.is_tied)
    unchanged = _Sizes(Forms(forms.linear), dtype).of(model)
    if (head := model.lm_head) is not None and forms.head != forms.embedding:
        head.weight = Dense(head.outputs, head.inputs, dtype, META)  # no more the embeddings'
    parameters = count_parameters(model)
    if info.pooling is None and (drafts := open_drafts(settings, model.config, device)):
        drafts.add_to(model, dtype, META, lambda *_: None)
    limit_drafts(settings.speculative_config, model)
    computed = TorchLM(model, HOST)
    speculation = choose_speculation(settings.speculative_config, computed.draft_head is not None)
    codes = CACHE_CODES[choose_cache_dtype(settings.kv_cache_dtype, model.config)]
    has_drafts = speculation.method == "mtp"
    place_layers(model, capacity_of(settings, info, device, speculation), drafts=has_drafts)
    shape = shape_of(model, dtype, drafts=has_drafts, codes=codes)
    loaded = LoadedModel(
        *(settings, folder, info, shape, computed, TorchSampler(), device, dtype, speculation),
        *(np.empty(0, np.int64), Memory(0, 0), None),
        additions=make_additions(addition_modules(settings), settings, folder, model, dtype),
    )
    sizes = _Sizes(forms, dtype)
    weights = counted = sizes.of(model)
    if model.config.quantization_config:
        weights += _stored_bytes(folder, model.config.quantization_config, dtype) - unchanged
    requirements = replace(estimate_requirements(loaded), weights=weights)
    return Footprint(
        parameters,
        requirements,
        sum(layout.num_bytes for layout in shape.kv_layouts),
        *_reads(model, sizes, weights / counted),
        rule_bytes(requirements.capacity.max_num_seqs, 0 if info.pooling else info.vocab_size),
    )


def _build(folder: Path, dtype: torch.dtype, *, pools: bool) -> DecoderLM:
    """A model on no device; with an MTP head if the config has one and the weights, if present, do
    not lack it."""
    config = read_model_config(folder, pools)
    is_quantised = config.quantization_config is not None
    if is_quantised and not has_weights(folder):
        raise ConfigError(f"model: {folder} has quantised weights, and none of them to look at")
    if has_weights(folder) and not is_quantised and not pools:
        stored = open_checkpoint(weight_files(folder))
        config = without_missing_head(config, with_mtp_head(stored, config))
    return build_model(config, dtype, META, pools=pools)


def _stored_bytes(folder: Path, quantization: Mapping[str, Any], dtype: torch.dtype) -> int:
    tensors = open_checkpoint(weight_files(folder)).tensors.values()
    return find_scheme(quantization).num_bytes(tensors, dtype)


def has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)


class _Sizes:
    """Bytes of modules with GEMMs in ``forms``; the size of a form is measured on some rows."""

    def __init__(self, forms: Forms, dtype: torch.dtype) -> None:
        self._forms, self._dtype = forms, dtype
        self._of_rows: dict[tuple[Quantization, int], int] = {}  # by the number of inputs, too

    def of(self, module: nn.Module) -> int:
        in_forms = [each for each in module.modules() if isinstance(each, InForm)]
        rows = {each.weight: each.outputs * self._row(each) for each in in_forms}
        of_rows = {parameter for weight in rows for parameter in weight.parameters()}
        tensors = {*module.parameters(), *module.buffers()} - of_rows
        return sum(rows.values()) // ROWS + sum(each.nbytes for each in tensors)

    def _row(self, layer: InForm) -> int:
        """The bytes of ``ROWS`` outputs."""
        inputs, form = layer.inputs, self._forms.of(layer)
        if form == "none":
            return ROWS * inputs * self._dtype.itemsize
        if (form, inputs) not in self._of_rows:
            some = ONLINE[form](torch.randn(ROWS, inputs).to(self._dtype))
            tensors = [*some.parameters(), *some.buffers()]
            self._of_rows[form, inputs] = sum(each.nbytes for each in tensors)
        return self._of_rows[form, inputs]


def _reads(model: DecoderLM, sizes: _Sizes, share: float) -> tuple[int, int, int, int]:
    """``always``, ``routed``, ``chosen`` and ``experts`` of a ``Footprint``. Embeddings are looked
    up, not read, unless they are the head too."""
    layers = model.model.layers
    mixtures = [each for each in layers.modules() if isinstance(each, Experts)]
    routed = sum(sizes.of(each.experts) for each in mixtures)
    head = model.lm_head if model.lm_head is not None else model.model.embed_tokens
    always = sizes.of(layers) - routed + (0 if head is None else sizes.of(head))
    if not mixtures:
        return int(always * share), 0, 0, 0
    routing = mixtures[0].gate.routing
    return (
        int(always * share),
        int(routed * share),
        routing.num_chosen,
        len(mixtures[0].experts),
    )
