"""The architectures of models whose texts are a part of them."""

from services.worker.models.families import Families

MEDIA = Families(
    models={
        "Ernie4_5_VLMoeForConditionalGeneration": "services.worker.media.ernie4_5_vl",
        "Gemma3ForConditionalGeneration": "services.worker.media.text_parts",
        "Glm46VForConditionalGeneration": "services.worker.media.glm4v",
        "Glm4vForConditionalGeneration": "services.worker.media.glm4v",
        "Glm4vMoeForConditionalGeneration": "services.worker.media.glm4v",
        "GlmOcrForConditionalGeneration": "services.worker.media.glm4v",
        "InternVLForConditionalGeneration": "services.worker.media.text_parts",
        "LightOnOcrForConditionalGeneration": "services.worker.media.text_parts",
        "LlavaForConditionalGeneration": "services.worker.media.text_parts",
        "Mistral3ForConditionalGeneration": "services.worker.media.text_parts",
        "PaddleOCRVLForConditionalGeneration": "services.worker.media.text_parts",
        "QianfanOCRForConditionalGeneration": "services.worker.media.text_parts",
        "Qwen2_5_VLForConditionalGeneration": "services.worker.media.qwen_vl",
        "Qwen3VLForConditionalGeneration": "services.worker.media.qwen_vl",
        "Qwen3VLMoeForConditionalGeneration": "services.worker.media.qwen_vl",
    },
    views={
        "Ernie4_5_VLMoeForConditionalGeneration": "services.worker.media.image_experts",
        "Glm46VForConditionalGeneration": "services.worker.media.glm4v",
        "Glm4vForConditionalGeneration": "services.worker.media.glm4v",
        "GlmOcrForConditionalGeneration": "services.worker.media.glm4v",
    },
)
