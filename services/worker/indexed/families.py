"""Architectures with indexed attention."""

from services.worker.models.families import Families

INDEXED = Families(
    models={
        "DeepseekV32ForCausalLM": "services.worker.indexed.deepseek_v32",
        "GlmMoeDsaForCausalLM": "services.worker.indexed.deepseek_v32",
    },
)
