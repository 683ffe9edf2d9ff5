"""LightOnOCR (arXiv 2601.14251): the text part, a Qwen3."""

from services.worker.models.qwen3 import Qwen3ForCausalLM

LightOnOcrForConditionalGeneration = Qwen3ForCausalLM
