"""GLM-5: a DeepSeek-V3.2 with neighbours as pairs of the indexer's rotation, and with layers that
attend to the keys of an earlier layer's choice (arXiv 2603.12201)."""

from services.worker.config.sparse_config import Num
from services.worker.indexed.deepseek_v32 import DeepseekV32ForCausalLM
from services.worker.layers.parallel import ALONE, Parallel
from shared.errors import ConfigError

FULL, SHARED = "full", "shared"
LETTERS = {"F": FULL, "S": SHARED}


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
