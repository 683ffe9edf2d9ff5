"""A decoder that transformers computes, with attention in our KV cache.

transformers finds a model's attention by a name that the model was loaded with
(``AttentionInterface``): ours has the name ``ATTENTION`` and is used by all layers.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from kernels.kv_write import kv_write
from kernels.paged_attention import AttentionBatch, AttentionOptions, paged_attention
from services.worker.layers.context import current_context
from services.worker.models import CausalLM

ATTENTION = "shoal"


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

    The names are those of transformers.
    """
    context = current_context()
    kv_cache = context.kv_caches[module.layer_idx]
    kv_write(kv_cache, key[0].transpose(0, 1), value[0].transpose(0, 1), context.slot_mapping)
    batch = context.attention
    assert isinstance(batch, AttentionBatch)
    attended = paged_attention(
        query[0].transpose(0, 1).contiguous(),
        kv_cache,
        batch,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        AttentionOptions(sliding_window, softcap, s_aux, value.shape[-1]),
    )
    return attended.unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend)


class TransformersLM(CausalLM):
    """``model`` taken apart: what makes hidden states, and its head, which may scale or cap logits.

    The states are those behind the last norm.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        nn.Module.__init__(self)
        _widen(model.get_output_embeddings())
        name = model.base_model_prefix
        self.base = getattr(model, name)
        setattr(model, name, _GivenStates())
        self.head = model

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        outputs = self.base(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        states: Tensor = outputs.last_hidden_state[0]
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(inputs_embeds=hidden.float().unsqueeze(0)).logits[0]
        return logits


def _widen(head: nn.Module) -> None:
    """Makes the products of ``head`` float32, as bfloat16 logits tie too often. An embedding whose
    weight it shares keeps its own."""
    for name, parameter in list(head.named_parameters(recurse=False)):
        setattr(head, name, nn.Parameter(parameter.detach().float(), requires_grad=False))


class _GivenStates(nn.Module):
    """Stands for the part below a head, and returns the states that the head is asked about."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **others: Any) -> "_States":
        return _States(last_hidden_state=inputs_embeds)


class _States(MoeModelOutputWithPast):
    """States alone: what else a head passes on, such as that of images, is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
