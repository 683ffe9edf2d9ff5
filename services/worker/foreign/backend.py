"""Loads an architecture that only transformers knows, and checks if it can be served.

No list of architectures is kept. A forward pass with a probing attention finds the entries of each
layer in the KV cache, and a comparison with transformers' own attention, in one piece, checks that
a sequence needs nothing else from step to step.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kernels.kv_layout import KVLayout
from services.worker.foreign.chunk_equivalence import logits_in_chunks, random_texts, whole_logits
from services.worker.foreign.families import find_family, of_texts, text_trunk
from services.worker.foreign.model import ATTENTION, TransformersLM
from services.worker.foreign.quantized import check_loaded, load_quantized
from services.worker.machine.kv_groups import KVSpec, group_layers
from services.worker.models.registry import read_side_file
from services.worker.startup.implementations import errors_as_config_errors
from services.worker.startup.model_shape import ModelShape
from services.worker.weights.schemes import find_scheme
from shared.errors import ConfigError
from shared.foreign_config import read_foreign_config
from shared.wire.messages import Capacity

log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()
transformers_logging.disable_default_handler()
transformers_logging.enable_propagation()

LOOKING_ATTENTION = "shoal-looks"
OWN_ATTENTION = "eager"  # every architecture has it
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Their frequencies depend on the longest sequence of a batch, once that is beyond these positions.
LONG_ROPES = {"dynamic", "longrope"}
# The relative distance of logits due to rounding; missing state makes a larger one.
MAX_DISTANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
SEED = 0


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """A layer's requirements on attention. ``head_dim`` is the larger of a key's and a value's.
    ``num_scored_heads`` have features that torch's fused attention does not support."""

    num_kv_heads: int
    head_dim: int
    window: int | None
    num_scored_heads: int = 0


NO_ATTENTION = LayerAttention(0, 0, None)


def load(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    capacity: Capacity,
    is_dummy: bool,
    codes: torch.dtype | None,
) -> tuple[TransformersLM, ModelShape]:
    """Returns the model and its shape, with ``codes`` in its KV cache if given; the weights are
    first read into host memory. Raises ConfigError with the reason if it does not load, or needs
    state that we do not keep."""
    config, quantization = _read_config(folder, capacity.max_model_len)
    text_config = config.get_text_config()
    if is_dummy and quantization:
        raise ConfigError(
            "load-format: dummy makes dense weights; the model has a quantization_config: take it"
            " out"
        )
    if quantization:
        model = load_quantized(folder, config, quantization, dtype, device.type)
    else:
        with errors_as_config_errors():
            model = _dummy(config, dtype) if is_dummy else _pretrained(folder, config, dtype)
    model.eval().requires_grad_(requires_grad=False).to(device)
    layers = _look(model, text_config, capacity.max_model_len)
    shape = _shape_of(model, text_config, layers, capacity, dtype, codes)
    texts = random_texts(text_config.vocab_size, device)
    with errors_as_config_errors():
        with _attention(model, OWN_ATTENTION):
            expected = torch.cat([whole_logits(model, ids) for ids in texts])
        loaded = TransformersLM(model)
        exact = [replace(layout, codes=None) for layout in shape.kv_layouts]
        computed = torch.cat(logits_in_chunks(loaded, exact, texts))
    distance = ((computed - expected).norm() / expected.norm()).item()
    if not distance <= MAX_DISTANCE[dtype]:
        raise ConfigError(
            f"model: {type(model).__name__}: its logits in chunks are {distance:.2g} from those in"
            f" one piece (limit {MAX_DISTANCE[dtype]:g}): it may keep state that is not in the KV"
            " cache"
        )
    torch.cuda.empty_cache()  # of the comparison, which is no step's
    loaded.put_groups(shape.layer_groups)
    return loaded, shape


def can_serve(folder: Path, max_model_len: int) -> bool:
    """True if transformers would compute the model, judged by its shapes: no weight is read or
    made."""
    try:
        config, quantization = _read_config(folder, max_model_len)
        if quantization:
            find_scheme(quantization)
        with errors_as_config_errors(), torch.device("meta"):
            model = _without_experts(_from_config(config, torch.bfloat16))
        _look(model.eval(), config.get_text_config(), max_model_len)
    except ConfigError:
        return False
    return True


def _without_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Without memory nothing tells the chosen ones; their output has the shape of their input."""
    for module in model.modules():
        if getattr(getattr(module, "down_proj", None), "ndim", 0) == 3:
            module.forward = lambda states, *args, **kwargs: torch.zeros_like(states)
    return model


def _read_config(folder: Path, max_model_len: int) -> tuple[Any, dict[str, Any] | None]:
    """The configuration, and its quantization_config apart from it. Raises ConfigError for a
    configuration that alone is reason to refuse the model."""
    config = read_foreign_config(folder)
    quantization = None
    for each in (config.get_text_config(), config):
        quantization = each.__dict__.pop("quantization_config", None) or quantization
    for problem in _unsupported(config.get_text_config(), max_model_len):
        raise ConfigError(f"model: {folder}: transformers cannot serve it: {problem}")
    find_family(config)
    return config, quantization or read_side_file(folder)


def _unsupported(config: Any, max_model_len: int) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported"
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        yield f"layer_types {', '.join(sorted(unknown))}: their state is not in the KV cache"
    rope = getattr(config, "rope_parameters", None) or {}
    for values in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        kind = values.get("rope_type")
        if kind not in LONG_ROPES:
            continue
        limit = values.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_model_len > limit:
            yield (
                f"rope type {kind!r} depends on the other requests beyond {limit} positions;"
                f" max-model-len is {max_model_len}: lower it to {limit}"
            )


def _dummy(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    log.warning("load-format = dummy: the weights are random, the output is not meaningful")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return _from_config(config, dtype)


def _from_config(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    family, config = find_family(config)
    model: PreTrainedModel = family._from_config(
        config, dtype=dtype, attn_implementation=of_texts(ATTENTION)
    )
    return model


def _pretrained(folder: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Only whole checkpoints in safetensors."""
    model: PreTrainedModel
    info: dict[str, Any]
    family, config = find_family(config)
    load: Any = family.from_pretrained  # its type does not know of the info
    model, info = load(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=of_texts(ATTENTION),
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    check_loaded(info)
    return model


def _look(model: PreTrainedModel, config: Any, max_model_len: int) -> dict[int, LayerAttention]:
    """Returns each layer's requirements on attention, by its place. Raises ConfigError."""
    name = type(model).__name__
    if not isinstance(getattr(model, model.base_model_prefix, None), nn.Module):
        raise ConfigError(f"model: {name} has no part of its own below its head")
    layers: dict[int, LayerAttention] = {}

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        if getattr(module, "is_causal", True) is False:
            raise ConfigError("its tokens see the ones behind them")
        if query.shape[1] % key.shape[1]:
            raise ConfigError(f"{query.shape[1]} heads are no multiple of {key.shape[1]} of keys")
        head_dim = max(key.shape[-1], value.shape[-1])
        window = options.get("sliding_window")
        is_bent = options.get("softcap") is not None or options.get("s_aux") is not None
        num_scored = query.shape[1] if is_bent else 0
        layers[module.layer_idx] = LayerAttention(key.shape[1], head_dim, window, num_scored)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(LOOKING_ATTENTION, attend)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with errors_as_config_errors(), torch.inference_mode(), _attention(model, LOOKING_ATTENTION):
        text_trunk(model)(input_ids=ids, use_cache=False)
    if not layers:
        raise ConfigError(f"model: {name} does not use transformers' attention interface")
    _check_windows(name, config, layers, max_model_len)
    return layers


def _check_windows(
    name: str, config: Any, layers: dict[int, LayerAttention], max_model_len: int
) -> None:
    """Raises ConfigError if a window is in transformers' mask alone, which we do not make: the
    comparison would not notice a missing window that is wider than the compared texts."""
    window = getattr(config, "sliding_window", None)
    if not window or window >= max_model_len or not getattr(config, "use_sliding_window", True):
        return
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers)
    for place, kind in enumerate(kinds):
        if kind == "sliding_attention" and (place not in layers or layers[place].window is None):
            raise ConfigError(
                f"model: {name}: layer {place} does not tell attention how wide its window is;"
                f" max-model-len {window} would need none"
            )


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    model.set_attn_implementation(of_texts(name))
    try:
        yield
    finally:
        model.set_attn_implementation(of_texts(ATTENTION))


def _shape_of(
    model: PreTrainedModel,
    config: Any,
    layers: dict[int, LayerAttention],
    capacity: Capacity,
    dtype: torch.dtype,
    codes: torch.dtype | None,
) -> ModelShape:
    """Layers without attention keep nothing in the KV cache."""
    widest = max(
        parameter.shape[-2]
        for parameter in model.parameters()
        if parameter.ndim >= 2 and config.vocab_size not in parameter.shape
    )
    num_experts = getattr(config, "num_experts_per_tok", None) or 1
    ordered = [layers.get(place, NO_ATTENTION) for place in range(max(layers) + 1)]
    specs = [KVSpec((2, each.num_kv_heads, each.head_dim), each.window) for each in ordered]
    found = group_layers(specs, capacity)
    return ModelShape(
        kv_layouts=[KVLayout(spec.entry, dtype, codes) for spec in specs],
        numbers_per_token=8 * config.hidden_size + 4 * widest * (1 + num_experts),
        num_scored_heads=max(layer.num_scored_heads for layer in ordered),
        groups=found.groups,
        layer_groups=found.of_layers,
    )
