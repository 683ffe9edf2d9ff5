"""The hybrids' architectures."""

from services.worker.models.families import Families

HYBRIDS = Families(
    models={
        "BailingMoeLinearV2ForCausalLM": "services.worker.hybrids.ling",
        "BailingMoeV2ForCausalLM": "services.worker.hybrids.ling",
        "BailingMoeV2_5ForCausalLM": "services.worker.hybrids.ling",
        "GraniteMoeHybridForCausalLM": "services.worker.hybrids.granite4",
        "KimiLinearForCausalLM": "services.worker.hybrids.kimi_linear",
        "Lfm2ForCausalLM": "services.worker.hybrids.lfm2",
        "Lfm2MoeForCausalLM": "services.worker.hybrids.lfm2",
        "Lfm2VlForConditionalGeneration": "services.worker.hybrids.lfm2",
        "MiniCPMV4_6ForConditionalGeneration": "services.worker.hybrids.qwen3_next",
        "NemotronHForCausalLM": "services.worker.hybrids.nemotron_h",
        "Qwen3NextForCausalLM": "services.worker.hybrids.qwen3_next",
        "Qwen3_5ForCausalLM": "services.worker.hybrids.qwen3_next",
        "Qwen3_5ForConditionalGeneration": "services.worker.hybrids.qwen3_next",
        "Qwen3_5MoeForCausalLM": "services.worker.hybrids.qwen3_next",
        "Qwen3_5MoeForConditionalGeneration": "services.worker.hybrids.qwen3_next",
    },
    views={
        "BailingMoeLinearV2ForCausalLM": "services.worker.hybrids.ling_names",
        "BailingMoeV2ForCausalLM": "services.worker.hybrids.ling_names",
        "BailingMoeV2_5ForCausalLM": "services.worker.hybrids.ling_names",
        "GraniteMoeHybridForCausalLM": "services.worker.hybrids.names",
        "KimiLinearForCausalLM": "services.worker.hybrids.names",
        "Lfm2ForCausalLM": "services.worker.hybrids.names",
        "Lfm2MoeForCausalLM": "services.worker.hybrids.names",
        "Lfm2VlForConditionalGeneration": "services.worker.hybrids.names",
        "NemotronHForCausalLM": "services.worker.hybrids.names",
    },
)
