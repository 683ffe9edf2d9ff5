"""The sizes for memory planning, independent of the backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from kernels.kv_layout import KVLayout
from services.worker.layers.experts import Experts
from services.worker.layers.gated import GatedProducts
from services.worker.layers.weights import Quantized
from services.worker.machine.kv_groups import group_layers, pack
from services.worker.machine.state_pool import StateSpec
from services.worker.models.decoder import DecoderLM
from shared.wire.messages import Capacity, Group


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``kv_layouts`` has one for each layer of the KV cache. ``numbers_per_token``: the most
    numbers of a token that exist at once within a layer. ``num_scored_heads``: the most heads of a
    layer with scores that torch's operators compute one by one. ``layer_groups`` has the index in
    ``groups`` of each layer of the KV cache. ``state_specs`` has one for each layer with a
    state."""

    kv_layouts: list[KVLayout]
    numbers_per_token: int
    num_scored_heads: int
    groups: tuple[Group, ...]
    layer_groups: Sequence[int]
    state_specs: Sequence[StateSpec] = ()

    @property
    def token_bytes(self) -> int:
        """Of a token in a block."""
        entries = pack([each.entry_bytes for each in self.kv_layouts], self.layer_groups)
        scales = pack([each.scales_bytes for each in self.kv_layouts], self.layer_groups)
        return sum(entries.sections) + sum(scales.sections)


def place_layers(model: DecoderLM, capacity: Capacity, *, drafts: bool) -> None:
    """Gives the layers their groups. Windows that hide nothing are removed."""
    model.drop_windows(capacity.max_model_len)
    model.put_groups(group_layers(model.kv_specs(drafts=drafts), capacity))


def shape_of(
    model: DecoderLM, dtype: torch.dtype, *, drafts: bool, codes: torch.dtype | None = None
) -> ModelShape:
    """Returns the shape of ``model``, with drafts if its MTP head makes them, and with ``codes`` in
    its KV cache if given.

    A layer holds its input, the residual sum, its norm and its rotation; and then the inputs of
    attention or the delta rule, or the two GEMMs of the feed-forward network with their outputs.
    For drafts, states are kept, computed again and joined with embeddings.
    """
    config = model.config
    layers = model.cached_layers()
    mixing = max(each.numbers_per_token for each in [*layers, *model.state_layers()])
    kept = 7 if drafts else 3
    kept += 4 * len(model.model.tapped)  # their copies, joined one after the other
    always = kept * config.hidden_size + 2 * config.head_dim
    mixtures = [_mixture_numbers(each) for each in model.modules() if isinstance(each, Experts)]
    networks = [
        each.down_proj.inputs for each in model.modules() if isinstance(each, GatedProducts)
    ]
    network = 4 * max([config.intermediate_size, *networks])
    if mixtures:
        network += config.hidden_size  # the sum of experts
    numbers = always + max(mixing, network, *mixtures)
    return ModelShape(
        kv_layouts=model.kv_layouts(dtype, drafts=drafts, codes=codes),
        numbers_per_token=numbers,
        num_scored_heads=max(each.num_scored_heads for each in layers),
        groups=model.groups,
        layer_groups=model.layer_groups(drafts=drafts),
        state_specs=model.state_specs(),
    )


def _mixture_numbers(experts: Experts) -> int:
    """The numbers of a token: its scores and their order, and for each choice the inputs of the
    expert's GEMMs, their intermediate values and their outputs."""
    (first, *_), num_experts = experts.products, len(experts.experts)
    outer, inner = first.gate_up_proj.inputs, first.down_proj.inputs
    each = 3 * outer + inner
    return 6 * num_experts + 2 * outer + experts.gate.routing.num_chosen * each


class ParameterCount(NamedTuple):
    """``active`` are a text token's parameters, on average if experts are whole."""

    total: int
    active: int

    def __str__(self) -> str:
        active = f", {_billions(self.active)} active" if self.active < self.total else ""
        return f"{_billions(self.total)} parameters{active}"


def count_parameters(model: DecoderLM) -> ParameterCount:
    """Counts the parameters of the filled ``model`` as numbers, independent of their storage."""
    total = _num_parameters(model.model)
    if model.lm_head is not None and not model.is_tied:
        total += _num_parameters(model.lm_head)
    unused = 0
    for experts in model.modules():
        if isinstance(experts, Experts):
            num = experts.gate.num_experts
            num_chosen = 0 if experts.of_images else experts.gate.routing.num_chosen
            own = sum(_num_parameters(each) for each in experts.products)
            unused += own * (num - num_chosen) // num
    return ParameterCount(total, total - unused)


def _num_parameters(module: nn.Module) -> int:
    forms = [each for each in module.modules() if isinstance(each, Quantized)]
    of_codes = {parameter for form in forms for parameter in form.parameters()}
    dense = [parameter.numel() for parameter in module.parameters() if parameter not in of_codes]
    return sum(dense) + sum(form.shape.numel() for form in forms)


def _billions(num: int) -> str:
    unit, name = (1e9, "B") if num >= 1e8 else (1e6, "M")
    return f"{num / unit:.1f}{name}"
