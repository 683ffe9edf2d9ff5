"""DeepSeek-V3.2 (arXiv 2512.02556), a DeepSeek-V3 with an indexer in each layer; and GLM-5, whose
layers may share one."""

from collections.abc import Set
from dataclasses import replace
from functools import cached_property

import torch

from kernels.index import IndexSpec
from services.worker.config.model_config import Num
from services.worker.indexed.attention import IndexedAttention
from services.worker.indexed.indexer import Indexer
from services.worker.layers.heads import LatentSpec
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.layers.rope import RotaryEmbedding
from services.worker.models.deepseek import DeepseekV3ForCausalLM
from services.worker.models.grouped_experts import make_mlp
from services.worker.models.parts import Parts
from shared.errors import ConfigError

EPS = 1e-6  # of the norm of index keys
SPARSE, DENSE = "sparse", "dense"
FULL, SHARED = "full", "shared"
LETTERS = {"F": FULL, "S": SHARED}


def check_device(device: torch.device) -> None:
    """Raises ConfigError, before weights are read."""
    if device.type == "cuda":
        raise ConfigError(
            f"device: {device}: indexed attention (index_topk) has no kernels for GPUs; use"
            " --device cpu or --model-impl transformers"
        )


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    class Config(DeepseekV3ForCausalLM.Config, frozen=True):
        index_topk: Num = 2048
        index_head_dim: Num = 128
        index_n_heads: Num = 64
        indexer_rope_interleave: bool = False
        mlp_layer_types: list[str] | None = None

        @property
        def index_spec(self) -> IndexSpec:
            return IndexSpec(
                num_heads=self.index_n_heads,
                dim=self.index_head_dim,
                rope_dim=self.qk_rope_head_dim,
                topk=self.index_topk,
                is_interleaved=self.indexer_rope_interleave,
                eps=EPS,
            )

        @property
        def latent_spec(self) -> LatentSpec:
            return replace(super().latent_spec, index_topk=self.index_topk)

        def is_sparse(self, layer: int) -> bool:
            types = self.mlp_layer_types
            if types is None:
                return super().is_sparse(layer)
            return layer >= len(types) or types[layer] == SPARSE

        def has_indexer(self, layer: int) -> bool:
            """False if ``layer`` attends to the keys that an earlier layer has chosen."""
            return True

        def problems(self) -> list[str]:
            problems = super().problems()
            if self.q_lora_rank is None:
                problems.append("q_lora_rank null is not supported: the indexer needs it")
            if self.index_head_dim < self.qk_rope_head_dim:
                problems.append(
                    f"index_head_dim {self.index_head_dim} is below qk_rope_head_dim"
                    f" {self.qk_rope_head_dim}"
                )
            problems += self.type_problems("mlp_layer_types", self.mlp_layer_types, {SPARSE, DENSE})
            return problems

        def type_problems(self, key: str, types: list[str] | None, known: Set[str]) -> list[str]:
            """Types of MTP layers may follow those of the trunk."""
            problems = []
            if types is not None and len(types) < self.num_hidden_layers:
                problems.append(f"{key} has {len(types)}, not {self.num_hidden_layers}")
            if unknown := set(types or []) - known:
                problems.append(f"{key} {', '.join(sorted(unknown))} are not supported")
            return problems

    config: Config

    def __init__(self, config: Config, parallel: Parallel = ALONE) -> None:
        check_device(torch.get_default_device())
        super().__init__(config, parallel)

    def make_parts(self, parts: Parts, layer: int) -> tuple[IndexedAttention, GatedMLP | Mixture]:
        config = self.config
        assert config.q_lora_rank is not None
        attention = IndexedAttention(
            config.hidden_size,
            config.latent_spec,
            layer,
            self.model.rotary,
            self.parallel,
            self._indexer_of(layer),
            query_rank=config.q_lora_rank,
            has_bias=config.attention_bias,
        )
        return attention, make_mlp(parts, config, layer)

    def _indexer_of(self, layer: int) -> Indexer:
        config = self.config
        if not config.has_indexer(layer):
            before = self.model.layers[layer - 1].self_attn
            assert isinstance(before, IndexedAttention)
            return before.source
        assert config.q_lora_rank is not None
        return Indexer(
            config.hidden_size, config.q_lora_rank, config.index_spec, layer, self._index_rotary
        )

    @cached_property
    def _index_rotary(self) -> RotaryEmbedding:
        """The trunk's, unless its pairs are others."""
        config, rotary = self.config, self.model.rotary
        is_interleaved = config.indexer_rope_interleave
        if rotary.is_interleaved == is_interleaved:
            return rotary
        length = config.max_position_embeddings
        return RotaryEmbedding(config.rope, config.rotary_dim, length, is_interleaved)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    class Config(DeepseekV32ForCausalLM.Config, frozen=True):
        q_lora_rank: int | None = 2048
        qk_nope_head_dim: int = 192
        v_head_dim: int = 256
        index_n_heads: Num = 32
        indexer_rope_interleave: bool = True
        indexer_types: list[str] | None = None
        index_topk_pattern: str | list[str] | None = None
        index_topk_freq: int = 1
        index_skip_topk_offset: int = 2

        @property
        def types(self) -> list[str]:
            """Of the trunk's layers, as transformers reads the keys."""
            if self.indexer_types is not None:
                return self.indexer_types
            if self.index_topk_pattern is not None:
                return [LETTERS.get(each, each) for each in self.index_topk_pattern]
            period, offset = max(self.index_topk_freq, 1), self.index_skip_topk_offset
            places = (max(layer - offset + 1, 0) for layer in range(self.num_hidden_layers))
            return [SHARED if place % period else FULL for place in places]

        def has_indexer(self, layer: int) -> bool:
            return layer >= self.num_hidden_layers or self.types[layer] == FULL

        def problems(self) -> list[str]:
            problems = super().problems()
            key = "indexer_types" if self.indexer_types is not None else "index_topk_pattern"
            problems += self.type_problems(key, self.types, {FULL, SHARED})
            if self.types[:1] == [SHARED]:
                problems.append(f"{key}: the first layer has no earlier one to share with")
            return problems

    config: Config

    def __init__(self, config: Config, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        stage = parallel.stage
        first = stage.layers(config.num_hidden_layers)[0]
        if not config.has_indexer(first):
            raise ConfigError(
                f"pipeline-parallel-size: stage {stage.number} of {stage.num} would begin with"
                f" layer {first}, which attends to the keys that an earlier stage has chosen"
            )
