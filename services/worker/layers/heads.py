"""The steps of a layer from queries, keys and values to the output of attention."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from services.worker.layers.linear import WeightPiece
from services.worker.layers.norm import RMSNorm
from services.worker.layers.parallel import Shard
from services.worker.layers.rope import RotaryEmbedding
from services.worker.layers.weights import empty_parameter


class LatentExpansion(nn.Module):
    """Head by head, ``key_dim`` outputs for its keys and ``value_dim`` for its values.

    ``weight`` [H · (key_dim + value_dim), rank] is dense, even if the checkpoint's is quantized: it
    is never multiplied with latents, but its halves with queries and with the heads' outputs.
    """

    def __init__(self, heads: Shard, key_dim: int, value_dim: int, rank: int) -> None:
        super().__init__()
        self._sizes = [key_dim, value_dim]
        self._rows = heads.times(key_dim + value_dim)
        self.weight = empty_parameter(self._rows.num, rank)

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        return {f"{name}.weight": WeightPiece(self.weight, 0, self._rows.start, self._rows.total)}

    def halves(self) -> tuple[Tensor, Tensor]:
        """Views of the weight: [H, key_dim, rank] and [H, value_dim, rank]."""
        by_head = torch.unflatten(self.weight, 0, (-1, sum(self._sizes)))
        keys, values = by_head.split(self._sizes, 1)
        return keys, values


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer's requirements on attention. A field with a default is an option: a backend without
    support for it refuses a model that sets it.

    Scores are multiplied by ``scale``. ``norm``: queries and keys are normed head by head, or
    all heads of a token together. ``window``: a token sees this number of the last keys, its own
    included. ``softcap``: a tanh keeps scores below it (arXiv 2408.00118). ``has_sinks``: each
    head has a score that takes its share of the softmax and gives no value (arXiv 2309.17453,
    as in gpt-oss). ``is_causal``: tokens see no later key, even in an image whose tokens see each
    other elsewhere.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    norm: Literal["none", "heads", "tokens"] = "none"
    is_interleaved: bool = False  # the pairs that are rotated are neighbours, not halves
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The requirements of a layer with latents (arXiv 2405.04434). A token has ``rank`` numbers,
    the source of all heads' keys and values, and a rotated key of ``rope_dim`` common to all heads.
    A head's query has ``nope_dim`` numbers without rotation and ``rope_dim`` with it. With an
    ``index_topk``, an option, a token attends to this number of chosen keys (``kernels.index``)."""

    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    is_interleaved: bool
    index_topk: int = 0

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def entry_dim(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.rope_dim


class Heads(NamedTuple):
    """``layer`` is the place of its KV cache in the context, and ``group`` that of its blocks;
    ``sinks`` [num_heads]."""

    spec: AttentionSpec
    layer: int
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    rotary: RotaryEmbedding
    sinks: nn.Parameter | None
    group: int = 0


class Latents(NamedTuple):
    """``layer`` is the place of its KV cache in the context, and ``group`` that of its blocks;
    ``norm`` is that of latents."""

    spec: LatentSpec
    layer: int
    norm: RMSNorm
    expansion: LatentExpansion
    rotary: RotaryEmbedding
    group: int = 0
