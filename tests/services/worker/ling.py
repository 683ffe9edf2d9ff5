"""Ling 2.5 and Ring-linear 2.0 in plain torch after their published code: transformers has neither.

The recurrence is computed token by token, and experts one by one.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class LingConfig(PreTrainedConfig):
    model_type = "ling_reference"


class RingConfig(PreTrainedConfig):
    model_type = "ring_reference"


class LingTwoConfig(PreTrainedConfig):
    model_type = "ling_2_reference"


class Norm(nn.Module):
    """Of ``num`` parts, each by itself."""

    def __init__(self, size: int, eps: float, num: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps, self._num = eps, num

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self._num, -1))
        normed = parts / (parts.square().mean(-1, keepdim=True) + self._eps).sqrt()
        return self.weight * normed.flatten(-2)


def turned(x: Tensor, theta: float, size: int, *, has_neighbours: bool) -> Tensor:
    """x [T, H, D], of which ``size`` elements are turned in pairs."""
    rates = theta ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(len(x)), rates)[:, None]
    own, rest = x[..., :size], x[..., size:]
    pairs = own.unflatten(-1, (-1, 2)) if has_neighbours else own.unflatten(-1, (2, -1)).mT
    a, b = pairs.unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    both = torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([(both if has_neighbours else both.mT).flatten(-2), rest], -1)


def slope_list(num: int) -> list[float]:
    if math.log2(num).is_integer():
        start = 2 ** (-(2 ** -(math.log2(num) - 3)))
        return [start * start**i for i in range(num)]
    lower = 2 ** math.floor(math.log2(num))
    return slope_list(lower) + slope_list(2 * lower)[0::2][: num - lower]


class Lightning(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        inner = config.num_attention_heads * config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, 3 * inner, bias=False)
        self.query_layernorm = Norm(config.head_dim, config.rms_norm_eps)
        self.key_layernorm = Norm(config.head_dim, config.rms_norm_eps)
        self.g_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.g_norm = Norm(inner, config.rms_norm_eps, config.group_norm_size)
        self.dense = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        config, size = self.config, self.config.head_dim
        query, key, value = self.query_key_value(x).unflatten(1, (3, -1, size)).unbind(1)
        rotated = int(size * config.partial_rotary_factor)
        query, key = (
            turned(norm(each), config.rope_theta, rotated, has_neighbours=False)
            for norm, each in ((self.query_layernorm, query), (self.key_layernorm, key))
        )
        scale = 1 - (self.layer - 1) / (config.num_hidden_layers - 1) + 1e-5
        decay = (-scale * torch.tensor(slope_list(config.num_attention_heads))).exp()
        state, outputs = torch.zeros(config.num_attention_heads, size, size), []
        for q, k, v in zip(query, key, value, strict=True):
            state = decay[:, None, None] * state + k[:, :, None] * v[:, None]
            outputs.append((q[:, None] @ state)[:, 0] / size**0.5)
        attended = self.g_norm(torch.stack(outputs).flatten(1))
        return self.dense(attended * self.g_proj(x).sigmoid())


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[T, H, D] each → [T, H · D]"""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    hidden = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


class Heads(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, size = config, config.head_dim
        num, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        outputs = (num + 2 * self.num_kv) * size
        self.query_key_value = nn.Linear(config.hidden_size, outputs, bias=False)
        self.query_layernorm = Norm(size, config.rms_norm_eps)
        self.key_layernorm = Norm(size, config.rms_norm_eps)
        self.dense = nn.Linear(num * size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        config, size, num = self.config, self.config.head_dim, self.config.num_attention_heads
        heads = self.query_key_value(x).unflatten(1, (-1, size))
        query, key, value = heads.split([num, self.num_kv, self.num_kv], 1)
        rotated = int(size * config.partial_rotary_factor)
        query, key = (
            turned(norm(each), config.rope_theta, rotated, has_neighbours=False)
            for norm, each in ((self.query_layernorm, query), (self.key_layernorm, key))
        )
        key, value = (each.repeat_interleave(num // self.num_kv, 1) for each in (key, value))
        return self.dense(causal(query, key, value, size**-0.5))


class Latents(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        num, nope, rope = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
        rank = config.q_lora_rank
        if rank is None:
            self.q_proj = nn.Linear(hidden, num * (nope + rope), bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, rank, bias=False)
            self.q_a_layernorm = Norm(rank, 1e-6)
            self.q_b_proj = nn.Linear(rank, num * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, 1e-6)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, num * (nope + config.v_head_dim), bias=False
        )
        self.dense = nn.Linear(num * config.v_head_dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        config, num = self.config, self.config.num_attention_heads
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        if config.q_lora_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query, query_turned = query.unflatten(1, (num, -1)).split([nope, rope], -1)
        latent, common = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, rope], 1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(1, (num, -1))
        key, value = expanded.split([nope, config.v_head_dim], -1)
        query_turned, common = (
            turned(each, config.rope_theta, rope, has_neighbours=True)
            for each in (query_turned, common[:, None])
        )
        query = torch.cat([query, query_turned], -1)
        key = torch.cat([key, common.expand(-1, num, -1)], -1)
        return self.dense(causal(query, key, value, (nope + rope) ** -0.5))


class Network(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, size, bias=False)
        self.up_proj = nn.Linear(hidden, size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Linear):
    expert_bias: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.gate = config, Gate(config)
        hidden, size = config.hidden_size, config.moe_intermediate_size
        self.experts = nn.ModuleList(Network(hidden, size) for _ in range(config.num_experts))
        self.shared_experts = Network(hidden, size * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self._of(token) for token in x]) + self.shared_experts(x)

    def _of(self, token: Tensor) -> Tensor:
        config = self.config
        scores = self.gate(token).sigmoid()
        corrected = (scores + self.gate.expert_bias).view(config.n_group, -1)
        best = corrected.topk(2).values.sum(1).topk(config.topk_group).indices
        allowed = torch.full_like(corrected, -torch.inf)
        allowed[best] = corrected[best]
        chosen = allowed.flatten().topk(config.num_experts_per_tok).indices
        weights = scores[chosen] / (scores[chosen].sum() + 1e-20) * config.routed_scaling_factor
        found = [self.experts[i](token) for i in chosen.tolist()]
        return (weights[:, None] * torch.stack(found)).sum(0)


class Layer(nn.Module):
    def __init__(self, config: Any, layer: int, attends: bool, full: type[nn.Module]) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(hidden, eps)
        self.attention = full(config, layer) if attends else Lightning(config, layer)
        self.post_attention_layernorm = Norm(hidden, eps)
        is_dense = layer < config.first_k_dense_replace
        self.mlp = Network(hidden, config.intermediate_size) if is_dense else Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpLayer(Layer):
    def __init__(self, config: Any, layer: int, full: type[nn.Module]) -> None:
        super().__init__(config, layer, True, full)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = Norm(hidden, eps), Norm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = Norm(hidden, eps)

    def draft(self, embedded: Tensor, state: Tensor) -> Tensor:
        both = torch.cat([self.enorm(embedded), self.hnorm(state)], 1)
        return self.final_layernorm(self(self.eh_proj(both)))


class Trunk(nn.Module):
    def __init__(self, config: Any, full: type[nn.Module]) -> None:
        super().__init__()
        num, size = config.num_hidden_layers, config.layer_group_size
        self.num = num
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = [
            Layer(config, i, (i + 1) % size == 0 or i >= num // size * size, full)
            for i in range(num)
        ]
        more = [MtpLayer(config, num + i, full) for i in range(config.num_nextn_predict_layers)]
        self.layers = nn.ModuleList([*layers, *more])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] → states after the norm [T, hidden]"""
        x = self.word_embeddings(ids)
        for layer in self.layers[: self.num]:
            x = layer(x)
        return self.norm(x)


class Reference(PreTrainedModel):
    base_model_prefix = "model"
    full: type[nn.Module]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Trunk(config, self.full)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids[0]))[None])

    @torch.inference_mode()
    def draft_logits(self, ids: list[int], drafts: list[int]) -> Tensor:
        """[1 + len(drafts), vocab_size] of the MTP layer after ``ids``, and after each of
        ``drafts``, which is paired with the layer's own last state."""
        states, outs = self.model(torch.tensor(ids[:-1])), []
        head: Any = self.model.layers[-1]
        for num in range(1 + len(drafts)):
            embedded = self.model.word_embeddings(torch.tensor([*ids, *drafts[:num]][1:]))
            outs.append(head.draft(embedded, states)[-1])
            states = torch.cat([states, outs[-1][None]])
        return linear(torch.stack(outs), self.lm_head.weight)


class BailingMoeV2_5ForCausalLM(Reference):  # noqa: N801, the published name
    config_class = LingConfig
    full = Latents


class BailingMoeLinearV2ForCausalLM(Reference):
    config_class = RingConfig
    full = Heads


class BailingMoeV2ForCausalLM(Reference):
    """Ling 2.0."""

    config_class = LingTwoConfig
    full = Heads


for model in (BailingMoeV2_5ForCausalLM, BailingMoeLinearV2ForCausalLM, BailingMoeV2ForCausalLM):
    AutoConfig.register(model.config_class.model_type, model.config_class)
    AutoModelForCausalLM.register(model.config_class, model)

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.15,
}
LATENTS: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
CASES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "ling 2.5": (BailingMoeV2_5ForCausalLM, {**SIZES, **LATENTS}),
    "ling 2.5, queries at once, a layer after the groups, six heads": (
        BailingMoeV2_5ForCausalLM,
        {
            **SIZES,
            **LATENTS,
            "q_lora_rank": None,
            "layer_group_size": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "group_norm_size": 3,
            "partial_rotary_factor": 0.25,
        },
    ),
    "ring-linear 2": (BailingMoeLinearV2ForCausalLM, SIZES),
}
