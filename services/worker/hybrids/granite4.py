"""Granite 4: Mamba-2 layers and attention, mostly without rotary positions, with or without
experts."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from torch import nn

from kernels.route import Routing
from services.worker.config.frequencies import Rope
from services.worker.config.model_config import ModelConfig, Num
from services.worker.config.sparse_config import SparseConfig
from services.worker.hybrids.delta_rows import DeltaSpec
from services.worker.hybrids.layer_kinds import ATTENTION, STATEFUL, NoRope, kind_problems
from services.worker.hybrids.mamba import Mamba, MambaOptions, step_limits
from services.worker.layers.attention import Attention
from services.worker.layers.experts import Experts
from services.worker.layers.gated import GatedNames
from services.worker.layers.mlp import GatedMLP
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE, Parallel, Rows, Shard, as_shard
from services.worker.models.decoder import DecoderLM
from services.worker.models.parts import Parts

OLDER_NAMES = {"attention": ATTENTION, "mamba": STATEFUL}


class FusedNames(GatedNames):
    """Gates and ups are one layer of a checkpoint."""

    def firsts(self, inner: int | Shard) -> Mapping[str, int | Shard | Rows]:
        _, num, size = own = as_shard(inner)
        ids = np.arange(2 * size).reshape(2, -1)[:, own.start : own.start + num]
        return {"input_linear": 2 * size if num == size else Rows(ids.ravel(), 2 * size)}


class GraniteLayer(nn.Module):
    """Mamba-2 or attention, then a network that all tokens share, and perhaps experts. Their
    outputs are multiplied by ``scale``."""

    def __init__(
        self,
        parts: Parts,
        mixer: Mamba | Attention,
        shared: GatedMLP,
        experts: Experts | None,
        scale: float,
    ) -> None:
        super().__init__()
        self.input_layernorm = parts.norm()
        if isinstance(mixer, Mamba):
            self.mamba = mixer
        else:
            self.self_attn = mixer
        self.post_attention_layernorm = parts.norm()
        self.shared_mlp = shared
        self.block_sparse_moe = experts
        self._mixer = mixer
        self._scale = scale

    def forward(self, ops: Ops[X], x: X) -> X:
        """[T, hidden] → [T, hidden]"""
        norm, scale, experts = self.post_attention_layernorm, self._scale, self.block_sparse_moe
        x = self._mixer.forward(ops, x, norm=self.input_layernorm, residual=x, scale=scale)
        if experts is None:
            return self.shared_mlp.forward(ops, x, norm=norm, residual=x, scale=scale)
        normed = ops.norm(x, norm)
        x = ops.experts(normed, experts, residual=x, scale=scale)
        return self.shared_mlp.forward(ops, normed, residual=x, scale=scale)


class GraniteMoeHybridForCausalLM(DecoderLM):
    class Config(SparseConfig, frozen=True, kw_only=True):
        intermediate_size: int = 11008  # of an expert
        shared_intermediate_size: Num = 1024
        num_local_experts: Annotated[int, msgspec.Meta(ge=0)] = 8
        num_experts_per_tok: Annotated[int, msgspec.Meta(ge=0)] = 2
        layer_types: list[str] | None = None
        position_embedding_type: Literal["rope", "nope"] | None = None
        normalization_function: str = "rmsnorm"
        attention_bias: bool = False
        attention_multiplier: float = 1.0
        embedding_multiplier: float = 1.0
        logits_scaling: float = 1.0
        residual_multiplier: float = 1.0
        mamba_n_heads: Num = 128
        mamba_n_groups: Num = 1
        mamba_d_state: Num = 256
        mamba_d_head: Num | Literal["auto"] = "auto"
        mamba_d_conv: Annotated[int, msgspec.Meta(ge=2, le=16)] = 4
        mamba_expand: Num = 2
        mamba_conv_bias: bool = True
        mamba_proj_bias: bool = False
        time_step_limit: tuple[Any, Any] | None = None

        @property
        def types(self) -> list[str]:
            """The type of each layer."""
            given = self.layer_types or [STATEFUL] * self.num_hidden_layers
            return [OLDER_NAMES.get(each, each) for each in given]

        @property
        def rotates(self) -> bool:
            return self.position_embedding_type == "rope"

        @property
        def rope(self) -> Rope:
            return super().rope if self.rotates else NoRope()

        @property
        def rotary_dim(self) -> int:
            return super().rotary_dim if self.rotates else 2

        @property
        def num_routed_experts(self) -> int:
            return self.num_local_experts

        @property
        def routing(self) -> Routing:
            return Routing(self.num_experts_per_tok, min_sum=0.0)

        def is_sparse(self, layer: int) -> bool:
            return self.num_local_experts > 0

        @property
        def delta_spec(self) -> DeltaSpec:
            """Of Mamba-2's heads; those of a group share B and C."""
            head_dim = self.mamba_d_head
            if head_dim == "auto":
                head_dim = self.mamba_expand * self.hidden_size // self.mamba_n_heads
            return DeltaSpec(
                num_heads=self.mamba_n_heads,
                num_key_heads=self.mamba_n_groups,
                key_dim=self.mamba_d_state,
                value_dim=head_dim,
                width=self.mamba_d_conv,
            )

        @property
        def mamba_options(self) -> MambaOptions:
            limits = step_limits(self.time_step_limit)
            return MambaOptions(self.mamba_conv_bias, self.mamba_proj_bias, limits)

        def problems(self) -> list[str]:
            found = super().problems() if self.num_local_experts else ModelConfig.problems(self)
            return [*found, *self._layer_problems(), *self._mamba_problems()]

        def _layer_problems(self) -> list[str]:
            problems = kind_problems(self.types, self.num_hidden_layers)
            if self.normalization_function != "rmsnorm":
                problems.append(
                    f"normalization_function {self.normalization_function!r} is not supported;"
                    " only 'rmsnorm' is"
                )
            return problems

        def _mamba_problems(self) -> list[str]:
            if STATEFUL not in self.types:
                return []
            problems, spec = [], self.delta_spec
            inner = self.mamba_expand * self.hidden_size
            if spec.num_heads * spec.value_dim != inner:
                problems.append(
                    f"mamba_n_heads {spec.num_heads} of mamba_d_head {spec.value_dim} are not"
                    f" mamba_expand {self.mamba_expand} times hidden_size {self.hidden_size}"
                )
            if spec.num_heads % spec.num_key_heads:
                problems.append(
                    f"mamba_n_heads {spec.num_heads} is no multiple of mamba_n_groups"
                    f" {spec.num_key_heads}"
                )
            try:
                step_limits(self.time_step_limit)
            except ValueError as error:
                problems.append(str(error))
            return problems

    config: Config

    def __init__(self, config: Config, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        self.embedding_scale = config.embedding_multiplier
        self.logits_scale = 1 / config.logits_scaling

    def make_layer(self, parts: Parts, layer: int) -> GraniteLayer:
        config, experts = self.config, None
        if config.is_sparse(layer):
            num = config.num_local_experts
            networks = parts.experts(num, config.intermediate_size)
            experts = Experts(parts.router(num, config.routing), networks)
        names = FusedNames(down="output_linear")
        shared = parts.mlp(size=config.shared_intermediate_size, names=names)
        scale = config.residual_multiplier
        return GraniteLayer(parts, self._make_mixer(parts, layer), shared, experts, scale)

    def _make_mixer(self, parts: Parts, layer: int) -> Mamba | Attention:
        config = self.config
        if config.types[layer] == STATEFUL:
            size, eps, options = config.hidden_size, config.rms_norm_eps, config.mamba_options
            return Mamba(size, config.delta_spec, layer, eps, self.parallel, options=options)
        scale, bias = config.attention_multiplier, config.attention_bias
        return parts.attention(layer, scale=scale, has_qkv_bias=bias, has_out_bias=bias)
