"""A checkpoint of Qwen2.5-VL with random weights, in bfloat16, and pictures.

Layers of the tower have the published width of 1280; the tower has 2 layers instead of 32, and the
text model 6 of width 1024 instead of 36 of 2048. One layer of the tower attends to the whole image;
of published ones one in eight does.
"""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.checkpoints import FOLDER, save_tokenizer

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)
MAX_LEN = 4096
TOWER = {
    "depth": 2,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [1],
}
TEXT = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 4096,
}
LIMITS = {"shortest_edge": 56 * 56, "longest_edge": 1008 * 1008}


def image_checkpoint(parent: Path = FOLDER) -> Path:
    """The folder; writes it if missing."""
    folder = parent / "images"
    if not (folder / "model.safetensors").exists():  # written last
        tokenizer = save_tokenizer(folder, TEXT["vocab_size"], MARKS, TEMPLATE)
        Qwen2VLImageProcessorPil(size=LIMITS).save_pretrained(folder)
        torch.manual_seed(0)
        model: Any = Qwen2_5_VLForConditionalGeneration(_config(tokenizer))
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _config(tokenizer: Any) -> Qwen2_5_VLConfig:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids: Any = dict(zip(names, tokenizer.convert_tokens_to_ids([*MARKS]), strict=True))
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    text = TEXT | {
        "max_position_embeddings": MAX_LEN,
        "rope_parameters": rotary,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    vision = TOWER | {"out_hidden_size": TEXT["hidden_size"]}
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="bfloat16", **ids
    )


class Pictures:
    """Distinct ones of ``side`` × ``side`` pixels, or of another ``width``: shades with noise."""

    def __init__(self, side: int, *, noise: int, level: int = 1, width: int = 0) -> None:
        random = np.random.default_rng(side)
        rows, columns = np.mgrid[0:side, 0 : width or side] * (255 - noise) // max(side, width)
        shades = np.stack([rows, columns, (rows + columns) // 2], -1)
        self._pixels = (shades + random.integers(0, noise + 1, shades.shape)).astype(np.uint8)
        self._level = level
        self._num = 0

    def next_png(self) -> bytes:
        self._num += 1
        file = io.BytesIO()
        image = Image.fromarray(np.roll(self._pixels, self._num, 0))
        image.save(file, "PNG", compress_level=self._level)
        return file.getvalue()

    def next_url(self) -> str:
        return url_of(self.next_png())


def url_of(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
