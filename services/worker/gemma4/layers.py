"""The layers of Gemma 4: dense networks, in some models beside experts, in others followed by a
gate of numbers that a token brings for each layer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.route import Routed
from services.worker.gemma4.attention import OwnAttention, SharedAttention
from services.worker.gemma4.config import Gemma4Config
from services.worker.gemma4.operators import open_inputs
from services.worker.layers.experts import Experts, Router
from services.worker.layers.linear import Linear, WeightPiece
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.weights import empty_parameter
from services.worker.models.parts import Parts


class ScaledRouter(Router):
    """Has a norm for its input, and a factor of each expert's weight."""

    factors: nn.Parameter

    def __init__(self, config: Gemma4Config) -> None:
        num, size = config.num_routed_experts, config.hidden_size
        super().__init__(size, num, config.routing)
        self.factors = empty_parameter(num, dtype=torch.float32)
        self.norm = RouterNorm(size, config.rms_norm_eps)

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        return {
            f"{name}.proj.weight": WeightPiece(self.weight),
            f"{name}.per_expert_scale": WeightPiece(self.factors),
        }

    def choose(self, x: Tensor, add: Callable[[Tensor], None]) -> Routed:
        chosen, weights = super().choose(x, add)
        return Routed(chosen, weights * self.factors[chosen.long()])


class RouterNorm(RMSNorm):
    """A checkpoint has its weight as the router's scale."""

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        return {f"{name.removesuffix('norm')}scale": WeightPiece(self.weight)}


class Gemma4Layer(nn.Module):
    """A dense layer. Its output is multiplied by ``layer_scalar``."""

    def __init__(
        self,
        config: Gemma4Config,
        parts: Parts,
        attention: OwnAttention | SharedAttention,
        layer: int,
    ) -> None:
        super().__init__()
        self.number = layer
        self.input_layernorm = parts.norm()
        self.self_attn = attention
        self.post_attention_layernorm = parts.norm()
        self.pre_feedforward_layernorm = parts.norm()
        self.mlp = parts.mlp(size=config.inner_size(layer), act="gelu_tanh")
        self.post_feedforward_layernorm = parts.norm()
        self.layer_scalar = empty_parameter(1)
        if num := config.num_inputs:
            self.per_layer_input_gate = Linear(config.hidden_size, num)
            self.per_layer_projection = Linear(num, config.hidden_size)
            self.post_per_layer_input_norm = parts.norm()

    def forward(self, ops: Ops[X], x: X, given: X | None = None) -> X:
        """x [T, hidden], ``given`` [T, layers · num_inputs], the token's numbers for all layers →
        [T, hidden]"""
        attended = self.self_attn.forward(ops, x, norm=self.input_layernorm)
        x = ops.norm(attended, self.post_attention_layernorm, residual=x)
        x = ops.norm(self.feed_forward(ops, x), self.post_feedforward_layernorm, residual=x)
        if given is not None:
            gate = ops.linear(x, self.per_layer_input_gate)
            opened = open_inputs(ops, gate, given, self.number)
            added = ops.linear(opened, self.per_layer_projection)
            x = ops.norm(added, self.post_per_layer_input_norm, residual=x)
        return ops.scale(x, self.layer_scalar)

    def feed_forward(self, ops: Ops[X], x: X) -> X:
        return self.mlp.forward(ops, x, norm=self.pre_feedforward_layernorm)


class SparseLayer(Gemma4Layer):
    """A layer with experts beside the dense network, on the same hidden states."""

    def __init__(
        self,
        config: Gemma4Config,
        parts: Parts,
        attention: OwnAttention | SharedAttention,
        layer: int,
    ) -> None:
        super().__init__(config, parts, attention, layer)
        self.post_feedforward_layernorm_1 = parts.norm()
        self.pre_feedforward_layernorm_2 = parts.norm()
        self.post_feedforward_layernorm_2 = parts.norm()
        assert config.moe_intermediate_size is not None  # a config's problem else
        networks = parts.experts(config.num_routed_experts, config.moe_intermediate_size)
        self.router = ScaledRouter(config)
        self._routing_scale = config.hidden_size**-0.5
        self.experts = nn.ModuleList(networks)  # first, since paths are names in checkpoints
        self.mixture = Experts(self.router, networks, "gelu_tanh")

    def feed_forward(self, ops: Ops[X], x: X) -> X:
        dense = self.mlp.forward(ops, x, norm=self.pre_feedforward_layernorm)
        dense = ops.norm(dense, self.post_feedforward_layernorm_1)
        inputs = ops.norm(x, self.pre_feedforward_layernorm_2)
        routed = ops.scale(ops.norm(x, self.router.norm), self._routing_scale)
        sparse = ops.experts(routed, self.mixture, given=inputs)
        return ops.norm(sparse, self.post_feedforward_layernorm_2, residual=dense)
