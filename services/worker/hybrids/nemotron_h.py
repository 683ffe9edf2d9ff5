"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: a layer is Mamba-2, attention without rotary
positions, an MLP or experts. MLPs and experts have no gates."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from torch import nn

from services.worker.config.frequencies import Rope
from services.worker.config.model_config import ModelConfig, Num
from services.worker.hybrids.delta_rows import DeltaSpec
from services.worker.hybrids.layer_kinds import ATTENTION, STATEFUL, NoRope, kind_problems
from services.worker.hybrids.mamba import Mamba, MambaOptions, step_limits
from services.worker.layers.attention import Attention
from services.worker.layers.experts import Router
from services.worker.layers.gated import UNGATED_NAMES, GatedProducts
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import DecoderLM
from services.worker.models.grouped_experts import GroupedConfig
from services.worker.models.mtp import add_mtp_head
from services.worker.models.parts import Parts

MLP, EXPERTS = "mlp", "moe"
PATTERN = {"M": STATEFUL, "*": ATTENTION, "-": MLP, "E": EXPERTS}
OLDER_NAMES = {"attention": ATTENTION, "mamba": STATEFUL}
HEAD_KINDS = [ATTENTION, EXPERTS]  # the published MTP heads
HEAD_NAMES = "mamba_num_heads", "n_groups"
ACTS = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}


def _kinds(names: Sequence[str] | None, pattern: str) -> list[str]:
    if names is not None:
        return [OLDER_NAMES.get(each, each) for each in names]
    return [PATTERN.get(each, each) for each in pattern]


class LatentMixture(Mixture):
    """Experts with inputs and outputs of a smaller size, and a network that all tokens share. The
    router reads the tokens as they are."""

    def __init__(
        self,
        gate: Router,
        experts: Iterable[GatedProducts],
        shared: GatedMLP,
        narrows: Linear,
        widens: Linear,
    ) -> None:
        super().__init__(gate, experts, shared, "relu2")
        self.fc1_latent_proj, self.fc2_latent_proj = narrows, widens

    def forward(self, ops: Ops[X], x: X, *, norm: RMSNorm, residual: X, scale: float = 1.0) -> X:
        """scale · (widens(experts(narrows(norm(x)))) + shared(norm(x))) + residual: [T, hidden] →
        [T, hidden]"""
        normed = ops.norm(x, norm)
        chosen = ops.experts(normed, self, given=ops.linear(normed, self.fc1_latent_proj))
        x = ops.linear(chosen, self.fc2_latent_proj, residual=residual, scale=scale)
        assert self.shared_experts is not None
        return self.shared_experts.forward(ops, normed, residual=x, scale=scale)


class NemotronLayer(nn.Module):
    """One mixer, whose input is normed."""

    def __init__(self, parts: Parts, mixer: Mamba | Attention | GatedMLP | Mixture) -> None:
        super().__init__()
        self.norm = parts.norm()
        self.mixer = mixer

    def forward(self, ops: Ops[X], x: X) -> X:
        """[T, hidden] → [T, hidden]"""
        return self.mixer.forward(ops, x, norm=self.norm, residual=x)


class NemotronHForCausalLM(DecoderLM):
    class Config(GroupedConfig, frozen=True, kw_only=True):
        intermediate_size: int = 21504
        num_hidden_layers: int = 0  # newer files list the layers alone
        rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_epsilon")
        layers_block_type: list[str] | None = None
        hybrid_override_pattern: str | None = None
        attention_bias: bool = False
        mlp_bias: bool = False
        mlp_hidden_act: str = "relu2"
        mamba_hidden_act: str = "silu"
        mamba_num_heads: Num = 128
        mamba_head_dim: Num = 64
        n_groups: Num = 8
        ssm_state_size: Num = 128
        conv_kernel: Annotated[int, msgspec.Meta(ge=2, le=16)] = 4
        use_conv_bias: bool = True
        use_bias: bool = False
        time_step_limit: tuple[Any, Any] | None = None
        n_routed_experts: Annotated[int, msgspec.Meta(ge=0)] = 8
        num_experts_per_tok: Annotated[int, msgspec.Meta(ge=0)] = 2
        n_shared_experts: int | None = 1
        moe_intermediate_size: Num = 7688
        moe_shared_expert_intermediate_size: Num = 7688
        moe_latent_size: Num | None = None
        num_nextn_predict_layers: int = 0
        mtp_layers_block_type: list[str] | None = None
        mtp_hybrid_override_pattern: str | None = None

        def __post_init__(self) -> None:
            if not self.num_hidden_layers:
                msgspec.structs.force_setattr(self, "num_hidden_layers", len(self.kinds))
            if self.num_nextn_predict_layers and self.mtp_kinds != HEAD_KINDS:
                msgspec.structs.force_setattr(self, "num_nextn_predict_layers", 0)

        @property
        def kinds(self) -> list[str]:
            """The kind of each layer."""
            return _kinds(self.layers_block_type, self.hybrid_override_pattern or "")

        @property
        def mtp_kinds(self) -> list[str]:
            """The kind of each layer of an MTP head."""
            return _kinds(self.mtp_layers_block_type, self.mtp_hybrid_override_pattern or "*E")

        @property
        def rope(self) -> Rope:
            return NoRope()

        @property
        def rotary_dim(self) -> int:
            return 2

        def is_sparse(self, layer: int) -> bool:
            return self.kinds[layer] == EXPERTS

        @property
        def delta_spec(self) -> DeltaSpec:
            """Of Mamba-2's heads; those of a group share B and C."""
            return DeltaSpec(
                num_heads=self.mamba_num_heads,
                num_key_heads=self.n_groups,
                key_dim=self.ssm_state_size,
                value_dim=self.mamba_head_dim,
                width=self.conv_kernel,
            )

        @property
        def mamba_options(self) -> MambaOptions:
            limits = step_limits(self.time_step_limit)
            return MambaOptions(self.use_conv_bias, self.use_bias, limits)

        def problems(self) -> list[str]:
            name = "layers_block_type"
            if self.layers_block_type is None:
                name = "hybrid_override_pattern"
            kinds, known = self.kinds, [*PATTERN.values()]
            problems = super().problems() if EXPERTS in kinds else ModelConfig.problems(self)
            problems += kind_problems(kinds, self.num_hidden_layers, known, name)
            for key, act in ACTS.items():
                if (given := getattr(self, key)) != act:
                    problems.append(f"{key} {given!r} is not supported; only {act!r} is")
            if EXPERTS in kinds and self.n_shared_experts != 1:
                problems.append(
                    f"n_shared_experts {self.n_shared_experts} is not supported; only 1 is"
                )
            return [*problems, *self._mamba_problems()]

        def _mamba_problems(self) -> list[str]:
            problems = []
            if self.mamba_num_heads % self.n_groups:
                problems.append(
                    f"mamba_num_heads {self.mamba_num_heads} is no multiple of n_groups"
                    f" {self.n_groups}"
                )
            try:
                step_limits(self.time_step_limit)
            except ValueError as error:
                problems.append(str(error))
            return problems

    config: Config

    def __init__(self, config: Config, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        add_mtp_head(self, min(config.num_nextn_predict_layers, 1), self._make_mtp_parts)

    def make_layer(self, parts: Parts, layer: int) -> NemotronLayer:
        config, kind = self.config, self.config.kinds[layer]
        if kind == STATEFUL:
            return NemotronLayer(parts, self._make_mamba(layer))
        if kind == ATTENTION:
            return NemotronLayer(parts, self._make_attention(layer))
        if kind == MLP:
            return NemotronLayer(parts, self._make_mlp(parts, config.intermediate_size))
        return NemotronLayer(parts, self._make_experts(parts))

    def _make_mtp_parts(self, parts: Parts, layer: int) -> tuple[Attention, Mixture]:
        """The first head, of two layers with one mixer each, as one of ours."""
        return self._make_attention(layer), self._make_experts(parts)

    def _make_attention(self, layer: int) -> Attention:
        bias = self.config.attention_bias
        return self.parts.attention(layer, has_qkv_bias=bias, has_out_bias=bias)

    def _make_mamba(self, layer: int) -> Mamba:
        config = self.config
        return Mamba(
            config.hidden_size,
            config.delta_spec,
            layer,
            config.rms_norm_eps,
            self.parallel,
            options=config.mamba_options,
            names=HEAD_NAMES,
        )

    def _make_mlp(self, parts: Parts, size: int) -> GatedMLP:
        bias = self.config.mlp_bias
        return parts.mlp(bias, size=size, act="relu2", names=UNGATED_NAMES)

    def _make_experts(self, parts: Parts) -> Mixture:
        config, hidden, latent = self.config, self.config.hidden_size, self.config.moe_latent_size
        gate = parts.router(config.n_routed_experts, config.routing, has_correction=True)
        shards = self.parallel.experts(config.n_routed_experts, config.moe_intermediate_size)
        networks = [GatedProducts(latent or hidden, each, names=UNGATED_NAMES) for each in shards]
        shared = self._make_mlp(parts, config.moe_shared_expert_intermediate_size)
        if latent is None:
            return Mixture(gate, networks, shared, "relu2")
        narrows = Linear(hidden, latent, config.mlp_bias)
        widens = Linear(latent, hidden, config.mlp_bias)
        return LatentMixture(gate, networks, shared, narrows, widens)
