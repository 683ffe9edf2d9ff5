"""The sizes that memory is planned by, whoever computes the model."""

from dataclasses import dataclass

import torch

from services.worker.layers.kv_layout import KVLayout
from services.worker.models.decoder import DecoderLM


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``kv_layouts`` has one for each layer of the KV cache. ``numbers_per_token``: how many
    numbers of a token exist at once within a layer, at most."""

    kv_layouts: list[KVLayout]
    numbers_per_token: int


def shape_of(
    model: DecoderLM, dtype: torch.dtype, *, drafts: bool, codes: torch.dtype | None = None
) -> ModelShape:
    """Returns the shape of ``model``, of which the MTP head may make drafts, and whose KV cache may
    have ``codes``.

    A layer holds its input, the sum that goes on, its norm and its rotation; and then what
    attention takes, or the two products of the feed-forward network with theirs. For drafts states
    are kept, computed again and joined with embeddings.
    """
    config = model.config
    attention = max(each.numbers_per_token for each in model.attentions())
    always = (7 if drafts else 3) * config.hidden_size + 2 * config.head_dim
    numbers = always + max(attention, 4 * config.intermediate_size)
    return ModelShape(model.kv_layouts(dtype, drafts=drafts, codes=codes), numbers)
