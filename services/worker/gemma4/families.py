"""Gemma 4's architectures."""

from services.worker.models.families import Families

GEMMA4 = Families(
    models={
        "Gemma4ForCausalLM": "services.worker.gemma4.model",
        "Gemma4ForConditionalGeneration": "services.worker.gemma4.model",
        "Gemma4UnifiedForCausalLM": "services.worker.gemma4.model",
        "Gemma4UnifiedForConditionalGeneration": "services.worker.gemma4.model",
    },
    views={
        "Gemma4ForCausalLM": "services.worker.gemma4.checkpoint",
        "Gemma4ForConditionalGeneration": "services.worker.gemma4.checkpoint",
    },
)
