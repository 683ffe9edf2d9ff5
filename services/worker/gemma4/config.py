"""The config of Gemma 4's texts. Heads differ in size and number between layers with a window and
layers that see all keys."""

from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from kernels.route import Routing
from services.worker.config.frequencies import Rope, read_rope
from services.worker.config.model_config import Num, Window
from services.worker.config.sparse_config import SparseConfig
from services.worker.models.gemma import ACT, Positive
from services.worker.models.qwen import WindowsConfig

FULL, SLIDING = "full_attention", "sliding_attention"
PERIOD = 6  # one layer in so many sees all keys
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class ProportionalRope(Rope, frozen=True, kw_only=True):
    """A share of a head's pairs turns, at the pace that these pairs have where all turn."""

    partial_rotary_factor: Share = 1.0
    factor: Positive = 1.0

    def frequencies(self, head_dim: int, length: int) -> Tensor:
        found = super().frequencies(head_dim, length) / self.factor
        num = int(self.partial_rotary_factor * head_dim // 2)
        return torch.cat((found[:num], torch.zeros(len(found) - num)))


class LayerSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of one layer that differ from the model's."""

    head_dim: Num | None = None
    num_key_value_heads: Num | None = None


class HeadSizes(NamedTuple):
    head_dim: int
    num_kv_heads: int


class Gemma4Config(SparseConfig, WindowsConfig, frozen=True, kw_only=True):
    head_size: int | None = msgspec.field(default=256, name="head_dim")
    tie_word_embeddings: bool | None = True
    hidden_activation: str = ACT
    attention_bias: bool = False
    use_sliding_window: bool = True
    sliding_window: Window = 512
    use_bidirectional_attention: str | None = None
    final_logit_softcapping: Positive | None = None
    global_head_dim: Num = 512
    num_global_key_value_heads: Num | None = None
    per_layer_config: dict[str, LayerSizes] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: Count = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: Count | None = 256
    vocab_size_per_layer_input: Num = 262_144
    enable_moe_block: bool = False
    num_experts: Num | None = None
    top_k_experts: Num | None = None
    moe_intermediate_size: Num | None = None

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer; the last one always sees all keys."""
        num = self.num_hidden_layers
        usual = [SLIDING if (layer + 1) % PERIOD else FULL for layer in range(num)]
        return [*(self.layer_types or usual)[:-1], FULL]

    @property
    def num_own(self) -> int:
        """The number of layers with keys and values of their own, which come first."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def num_inputs(self) -> int:
        """The numbers that each layer gets of a token besides the hidden state."""
        return self.hidden_size_per_layer_input or 0

    @property
    def num_routed_experts(self) -> int:
        return self.num_experts or 0

    @property
    def routing(self) -> Routing:
        return Routing(self.top_k_experts or 0, min_sum=0.0)

    @property
    def rotary_dim(self) -> int:
        return self.head_sizes(self.num_hidden_layers - 1).head_dim

    @property
    def rope(self) -> Rope:
        return self._rope(FULL)

    @property
    def sliding_rope(self) -> Rope:
        """Raises ValueError."""
        return self._rope(SLIDING)

    def is_sparse(self, layer: int) -> bool:
        return self.enable_moe_block

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.kinds[layer] == SLIDING else None

    def head_sizes(self, layer: int) -> HeadSizes:
        sizes = HeadSizes(self.head_dim, self.num_key_value_heads)
        own = (self.per_layer_config or {}).get(str(layer), LayerSizes())
        if self.kinds[layer] == FULL and self.per_layer_config is None:
            num = self.num_global_key_value_heads if self.attention_k_eq_v else None
            own = LayerSizes(self.global_head_dim, num)
        return HeadSizes(
            own.head_dim or sizes.head_dim, own.num_key_value_heads or sizes.num_kv_heads
        )

    def has_keys_as_values(self, layer: int) -> bool:
        return self.attention_k_eq_v and self.kinds[layer] == FULL

    def source_of(self, layer: int) -> int:
        """The layer with the keys and values that ``layer`` reads: itself or the last of its kind
        with its own."""
        if layer < self.num_own:
            return layer
        return max(each for each in range(self.num_own) if self.kinds[each] == self.kinds[layer])

    def inner_size(self, layer: int) -> int:
        """Of the dense network."""
        is_wide = self.use_double_wide_mlp and layer >= self.num_own
        return self.intermediate_size * (2 if is_wide else 1)

    def act_problems(self) -> list[str]:
        if self.hidden_activation == ACT:
            return []
        return [f"hidden_activation {self.hidden_activation!r} is not supported; only {ACT!r} is"]

    def rope_problems(self) -> list[str]:
        problems = []
        for kind in (FULL, SLIDING):
            try:
                self._rope(kind)
            except ValueError as error:
                problems.append(f"{kind}: {error}")
        return problems

    def problems(self) -> list[str]:
        sparse = self.num_experts, self.top_k_experts, self.moe_intermediate_size
        if self.enable_moe_block and None in sparse:
            return ["enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size"]
        found = super().problems() if self.enable_moe_block else WindowsConfig.problems(self)
        if found:
            return found
        if self.use_bidirectional_attention == "all":
            found.append("use_bidirectional_attention 'all' is not supported; only 'vision' is")
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            found.append(
                f"vocab_size_per_layer_input {self.vocab_size_per_layer_input} is below vocab_size"
                f" {self.vocab_size}"
            )
        return [*found, *self._size_problems(), *self._sharing_problems()]

    def _size_problems(self) -> list[str]:
        problems = []
        for kind in {*self.kinds}:
            layers = [layer for layer, each in enumerate(self.kinds) if each == kind]
            sizes = {self.head_sizes(layer) for layer in layers}
            if len(sizes) > 1:
                problems.append(f"heads of {len(sizes)} sizes in layers of the kind {kind}: one is")
            for head_dim, num in sizes:
                if self.num_attention_heads % num:
                    problems.append(
                        f"num_attention_heads {self.num_attention_heads} is no multiple of {num},"
                        f" the KV heads of {kind}"
                    )
                if head_dim % 2:
                    problems.append(f"head_dim {head_dim} of {kind} is odd")
        return problems

    def _sharing_problems(self) -> list[str]:
        lacking = {*self.kinds} - {*self.kinds[: max(0, self.num_own)]}
        return [
            f"num_kv_shared_layers {self.num_kv_shared_layers} leaves no layer of the kind {kind}"
            " with keys and values of its own"
            for kind in sorted(lacking)
        ]

    def _rope(self, kind: str) -> Rope:
        """Raises ValueError."""
        given = (self.rope_parameters or {}).get(kind) or ROPES[kind]
        nested = {key: value for key, value in given.items() if value is not None}
        values = {"rope_theta": ROPES[kind]["rope_theta"]} | nested
        if nested.get("rope_type") != "proportional":
            return read_rope(self.with_rope_defaults(values, ROPES[kind]["rope_theta"]))
        try:
            return msgspec.convert(values, ProportionalRope)
        except msgspec.ValidationError as error:
            raise ValueError(f"rope type 'proportional': {error}") from None


class UnifiedConfig(Gemma4Config, frozen=True, kw_only=True):
    """Of the model without encoders (12B)."""

    sliding_window: Window = 1024
    use_bidirectional_attention: str | None = "vision"
    hidden_size_per_layer_input: Count | None = 0
