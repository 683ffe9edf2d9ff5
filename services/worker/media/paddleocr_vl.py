"""PaddleOCR-VL (arXiv 2510.14528): the text part, an ERNIE 4.5 with halves as rotated pairs."""

from services.worker.media.qwen2_5_vl import AxesConfig
from services.worker.models.ernie4_5 import Ernie4_5ForCausalLM


class PaddleOCRVLForConditionalGeneration(Ernie4_5ForCausalLM):
    class Config(AxesConfig, Ernie4_5ForCausalLM.Config, frozen=True):
        pass

    config: Config
    is_interleaved = False
