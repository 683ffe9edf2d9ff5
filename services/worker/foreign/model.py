"""A decoder that transformers computes, with attention in our KV cache.

transformers finds a model's attention by a name that the model was loaded with
(``AttentionInterface``): ours has the name ``ATTENTION`` and is used by all layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from kernels import paged_attention
from kernels.kv_write import kv_write
from kernels.linear import linear
from kernels.paged_attention import AttentionOptions
from services.worker.foreign.families import text_trunk
from services.worker.layers.context import current_context
from services.worker.models import TorchCausalLM

ATTENTION = "shoal"
KV_GROUP = "shoal_kv_group"  # an attribute of a layer's modules


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key [1, H_kv, T, D], value [1, H_kv, T, value_dim] → [1, T, H, value_dim]

    The names are transformers'.
    """
    context = current_context()
    kv, inputs = context.kv_caches[module.layer_idx], context.groups[getattr(module, KV_GROUP, 0)]
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    kv_write(kv.entries, keys, values, inputs.slot_mapping, kv.scales)
    attended = paged_attention.attend(
        query[0].transpose(0, 1).contiguous(),
        kv.entries,
        inputs.attention,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        AttentionOptions(sliding_window, softcap, s_aux, value.shape[-1]),
        kv.scales,
    )
    return attended.unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend)


class TransformersLM(TorchCausalLM):
    """``model`` in two parts: the trunk, and its head, which may scale or cap logits.

    The states come after the last norm. Raises ValueError if the head is not a GEMM.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        nn.Module.__init__(self)
        product = _replace_head(model)
        self.vocab_size, self.hidden_size = product.weight.shape
        self.state_size = self.hidden_size
        self.base = text_trunk(model)
        setattr(model, model.base_model_prefix, _GivenStates())
        self.head = model

    def put_groups(self, layer_groups: Sequence[int]) -> None:
        """Gives layers the blocks of their groups, by default of the first."""
        for module in self.base.modules():
            layer = getattr(module, "layer_idx", None)
            if layer is not None and layer < len(layer_groups):
                setattr(module, KV_GROUP, layer_groups[layer])

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        outputs = self.base(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        states: Tensor = outputs.last_hidden_state[0]
        return states

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(inputs_embeds=hidden.float().unsqueeze(0)).logits[0]
        return logits if out is None else out.copy_(logits)


class _WideProduct(nn.Module):
    """``head`` with float32 results, as bfloat16 logits tie too often. On a CPU its weight is
    float32 as well, since GEMMs round to their operands' dtype there; an embedding that shares
    it keeps its own."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        if not head.weight.is_cuda:
            for name, parameter in head.named_parameters():
                setattr(self, name, nn.Parameter(parameter.detach().float(), requires_grad=False))

    def forward(self, states: Tensor) -> Tensor:
        """[1, S, hidden] → [1, S, vocab_size]"""
        x = states[0].to(self.weight.dtype)
        return linear(x, self.weight, self.bias, out_dtype=torch.float32).unsqueeze(0)


def _replace_head(model: PreTrainedModel) -> _WideProduct:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"its head is no linear layer but a {type(head).__name__}")
    path = next(path for path, module in model.named_modules() if module is head)
    product = _WideProduct(head)
    model.set_submodule(path, product)
    return product


class _GivenStates(nn.Module):
    """Replaces the trunk below a head, and returns the head's input states."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **others: Any) -> "_States":
        return _States(last_hidden_state=inputs_embeds)


class _States(MoeModelOutputWithPast):
    """States alone: the other inputs of a head, for example of images, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
