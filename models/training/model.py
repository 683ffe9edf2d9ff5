"""The embedded model for training: a Qwen2 trunk with one MTP layer in MiMo layout.

Parameter names are those of the published checkpoints. Shapes: B rows, T positions, D hidden
size, H heads. The output head is the embedding's weight and is applied by the callers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, in the words of Qwen2's config.json."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of all positions, each [positions, head_dim]."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(
        torch.arange(config.max_position_embeddings), config.rope_theta**-exponents
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to [B, H, T, head_dim]; the halves are the pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


KeyValue = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Grouped-query attention with biases on q, k and v."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size)
        self.k_proj = nn.Linear(config.hidden_size, key_size)
        self.v_proj = nn.Linear(config.hidden_size, key_size)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        """Reshape [B, T, H * head_dim] to [B, H, T, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, earlier: list[KeyValue], mask: Tensor | None
    ) -> Tensor:
        """Attend within x; `earlier` key-values come first and the new ones are appended."""
        query = rotate(self.heads(self.q_proj(x)), cos, sin).to(x.dtype)
        key = rotate(self.heads(self.k_proj(x)), cos, sin).to(x.dtype)
        value = self.heads(self.v_proj(x)).to(x.dtype)
        earlier.append((key, value))
        if mask is not None:
            key = torch.cat([pair[0] for pair in earlier], dim=2)
            value = torch.cat([pair[1] for pair in earlier], dim=2)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        out = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, earlier: list[KeyValue], mask: Tensor | None
    ) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, earlier, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpLayer(DecoderLayer):
    """Drafts the token after the next from a hidden state and the next token's embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.token_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.final_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def combine(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Join hidden states with embeddings of the following tokens, both [B, T, D]."""
        pair = torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), dim=-1)
        return self.input_proj(pair)


class Trunk(nn.Module):
    """Everything under `model.` in the checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mtp_layers = nn.ModuleList([MtpLayer(config)])

    @property
    def mtp_layer(self) -> MtpLayer:
        """The only MTP layer."""
        layer = self.mtp_layers[0]
        assert isinstance(layer, MtpLayer)
        return layer


class ShoalTiny(nn.Module):
    """The whole model; `hidden` is the trunk, `draft` the MTP layer and its recursion."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(initialise)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the trunk's output before `model.norm`, [B, T, D], for ids [B, T]."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin, [], None)
        return x

    def draft(self, hidden: Tensor, ids: Tensor, num_steps: int) -> list[Tensor]:
        """Run the MTP layer `num_steps` times on its own output, all positions at once.

        Index p of every result comes from the pair (h_p, t_{p+1}) at rotary position p and predicts
        t_{p+2}: hidden [B, T, D], ids [B, T + 1], results [B, T, D] before the head. Step s uses
        the output of step s - 1 at p - 1 as h_p, so its first s - 1 entries are meaningless. It
        sees the key-values a server has there: see `recursion_mask`.
        """
        layer = self.model.mtp_layer
        num_positions = hidden.shape[1]
        embedded = self.model.embed_tokens(ids[:, 1:])
        cos, sin = self.cos[:num_positions], self.sin[:num_positions]
        outputs: list[Tensor] = []
        earlier: list[KeyValue] = []
        for step in range(num_steps):
            x = layer.combine(hidden, embedded)
            mask = recursion_mask(num_positions, step) if step else None
            hidden = layer(x, cos, sin, earlier, mask)
            outputs.append(layer.final_layernorm(hidden))
            hidden = torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1)
        return outputs


def recursion_mask(num_positions: int, step: int) -> Tensor:
    """Return the keys visible to step `step` (from 0), [T, (step + 1) * T], True = visible.

    At p the key-values of true hidden states end at p - step; step i wrote p - step + i.
    """
    distance = torch.arange(num_positions)[:, None] - torch.arange(num_positions)[None, :]
    own_outputs = [distance == step - i for i in range(1, step + 1)]
    return torch.cat([distance >= step, *own_outputs], dim=1)


def initialise(module: nn.Module) -> None:
    """Draw matrices from N(0, 0.02) and set biases to zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
