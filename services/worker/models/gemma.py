"""Gemma 2 and 3 (arXiv 2408.00118, 2503.19786): layers norm their inputs and outputs. In Gemma 2
every second layer has a window, and scores and logits are soft-capped; Gemma 3 norms queries and
keys head by head, and most layers have a window, with another frequency of the rotary positions."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
from torch import nn

from kernels.silu_mul import Act
from services.worker.config.frequencies import Rope, read_rope
from services.worker.config.model_config import Window
from services.worker.layers.attention import Attention
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import DecoderLM
from services.worker.models.parts import Parts
from services.worker.models.qwen import WindowsConfig

Positive = Annotated[float, msgspec.Meta(gt=0)]
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4
GLOBAL, LOCAL = "full_attention", "sliding_attention"
ACT = "gelu_pytorch_tanh"


class GemmaConfig(WindowsConfig, frozen=True):
    """The config of Gemma 2 and 3. Without ``layer_types`` one layer in ``sliding_window_pattern``
    sees all keys."""

    norm_offset: ClassVar[float] = 1.0

    head_size: int | None = msgspec.field(default=256, name="head_dim")
    tie_word_embeddings: bool | None = True
    hidden_activation: str = ACT
    attention_bias: bool = False
    query_pre_attn_scalar: Positive = 256
    sliding_window: Window = 4096
    sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] = 2
    use_sliding_window: bool = True
    use_bidirectional_attention: bool | None = None
    final_logit_softcapping: Positive | None = None

    @property
    def softcap(self) -> float | None:
        """The soft cap of attention scores."""
        return None

    def is_local(self, layer: int) -> bool:
        """True if ``layer`` has a window."""
        if self.layer_types:
            return self.layer_types[layer] == "sliding_attention"
        return (layer + 1) % self.sliding_window_pattern > 0

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.is_local(layer) else None

    def act_problems(self) -> list[str]:
        if self.hidden_activation == ACT:
            return []
        return [f"hidden_activation {self.hidden_activation!r} is not supported; only {ACT!r} is"]

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.use_bidirectional_attention:
            problems.append("use_bidirectional_attention true is not supported; only false is")
        return problems


class SandwichLayer(nn.Module):
    def __init__(self, parts: Parts, attention: Attention, act: Act = "gelu_tanh") -> None:
        super().__init__()
        self.input_layernorm = parts.norm()
        self.self_attn = attention
        self.post_attention_layernorm = parts.norm()
        self.pre_feedforward_layernorm = parts.norm()
        self.mlp = parts.mlp(act=act)
        self.post_feedforward_layernorm = parts.norm()

    def forward(self, ops: Ops[X], x: X) -> X:
        attended = self.self_attn.forward(ops, x, norm=self.input_layernorm)
        x = ops.norm(attended, self.post_attention_layernorm, residual=x)
        given = self.mlp.forward(ops, x, norm=self.pre_feedforward_layernorm)
        return ops.norm(given, self.post_feedforward_layernorm, residual=x)


class GemmaLM(DecoderLM):
    config: GemmaConfig
    head_norm: ClassVar[Literal["none", "heads"]] = "none"

    def __init__(self, config: GemmaConfig, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        dtype = self.model.embed_tokens.weight.values.dtype  # as transformers rounds it
        self.embedding_scale = torch.tensor(
            config.hidden_size**0.5, dtype=dtype, device="cpu"
        ).item()
        self.logits_softcap = config.final_logit_softcapping

    def make_layer(self, parts: Parts, layer: int) -> SandwichLayer:
        config, bias = self.config, self.config.attention_bias
        attention = parts.attention(
            layer,
            norm=self.head_norm,
            scale=config.query_pre_attn_scalar**-0.5,
            window=config.window(layer),
            softcap=config.softcap,
            rotary=self.model.local_rotary if config.is_local(layer) else None,
            has_qkv_bias=bias,
            has_out_bias=bias,
        )
        return SandwichLayer(parts, attention)


class Gemma2ForCausalLM(GemmaLM):
    class Config(GemmaConfig, frozen=True):
        attn_logit_softcapping: Positive | None = 50.0
        final_logit_softcapping: Positive | None = 30.0

        @property
        def softcap(self) -> float | None:
            return self.attn_logit_softcapping


class Gemma3ForCausalLM(GemmaLM):
    head_norm = "heads"

    class Config(GemmaConfig, frozen=True):
        sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] = 6
        rope_local_base_freq: float | None = None

        @property
        def rope_values(self) -> dict[str, Any]:
            """The values of layers that see all keys."""
            nested = self.rope_scaling or self._nested(GLOBAL)
            return self.with_rope_defaults(nested, self.rope_theta or GLOBAL_THETA)

        @property
        def local_rope(self) -> Rope:
            theta = self.rope_local_base_freq or LOCAL_THETA
            return read_rope(self.with_rope_defaults(self._nested(LOCAL), theta))

        def rope_problems(self) -> list[str]:
            problems = super().rope_problems()
            try:
                _ = self.local_rope
            except ValueError as error:
                problems.append(str(error))
            return problems

        def _nested(self, kind: str) -> dict[str, Any]:
            return (self.rope_parameters or {}).get(kind) or {}
