"""Families with images: their classes in transformers, and configs of tiny models."""

from typing import Any, NamedTuple

import transformers
from transformers.models.ernie4_5_vl_moe import image_processing_pil_ernie4_5_vl_moe
from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

VISION = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}
PLAIN_VISION = VISION | {
    "depth": 4,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 64,
}
DEEP_VISION = PLAIN_VISION | {"deepstack_visual_indexes": [2, 0]}
ROTATIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
AXES = {"rope_parameters": ROTATIONS}
MIXED = {
    "num_hidden_layers": 3,
    "rope_parameters": ROTATIONS | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
OF_STATES = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": ROTATIONS
    | {"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
OF_MODALITY = {
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": [48, 32],
    "moe_num_shared_experts": 2,
    "rope_parameters": ROTATIONS | {"mrope_section": [3, 3, 2]},
}
IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
ERNIE_IDS = ("image_start_token_id", "image_end_token_id", *IDS[2:])


class Parts(NamedTuple):
    """The classes of a family in transformers, the config of its tower, more keys of texts, the
    names of the ids of ``MEDIA``, and a file about videos."""

    config: Any
    model: Any
    images: Any
    vision: dict[str, Any]
    text: dict[str, Any] = AXES
    ids: tuple[str, ...] = IDS
    videos: dict[str, Any] | None = None


FAMILIES = {
    "qwen2.5-vl": Parts(
        transformers.Qwen2_5_VLConfig,
        transformers.Qwen2_5_VLForConditionalGeneration,
        image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil,
        VISION
        | {"depth": 3, "num_heads": 2, "out_hidden_size": 64}
        | {"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    ),
    "qwen3-vl": Parts(
        transformers.Qwen3VLConfig,
        transformers.Qwen3VLForConditionalGeneration,
        image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil,
        DEEP_VISION,
        MIXED,
    ),
    "qwen3-vl-moe": Parts(
        transformers.Qwen3VLMoeConfig,
        transformers.Qwen3VLMoeForConditionalGeneration,
        image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil,
        DEEP_VISION,
        MIXED | EXPERTS,
    ),
    "paddleocr-vl": Parts(
        transformers.PaddleOCRVLConfig,
        transformers.PaddleOCRVLForConditionalGeneration,
        image_processing_pil_paddleocr_vl.PaddleOCRVLImageProcessorPil,
        VISION | {"num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 112},
    ),
    "ernie4.5-vl": Parts(
        transformers.Ernie4_5_VLMoeConfig,
        transformers.Ernie4_5_VLMoeForConditionalGeneration,
        image_processing_pil_ernie4_5_vl_moe.Ernie4_5_VLMoeImageProcessorPil,
        VISION | {"depth": 3, "num_heads": 2},
        OF_MODALITY,
        ERNIE_IDS,
        {"temporal_patch_size": 2, "min_frames": 4, "fps": None, "font": "Roboto-Regular.ttf"},
    ),
}
WITH_STATES = {
    "qwen3.5": Parts(
        transformers.Qwen3_5Config,
        transformers.Qwen3_5ForConditionalGeneration,
        image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil,
        PLAIN_VISION,
        OF_STATES,
    ),
    "qwen3.5-moe": Parts(
        transformers.Qwen3_5MoeConfig,
        transformers.Qwen3_5MoeForConditionalGeneration,
        image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil,
        PLAIN_VISION,
        OF_STATES | EXPERTS | {"shared_expert_intermediate_size": 48},
    ),
}
