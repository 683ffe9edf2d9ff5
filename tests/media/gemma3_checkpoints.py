"""Tiny random checkpoints of Gemma 3 with images, and transformers' texts for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.media.checkpoints import IMAGE, SPECIAL, TEMPLATE, save, text_config
from tests.media.pictures import picture
from tests.media.references import Clip, Reference, load_reference

START, END, TOKEN = MEDIA = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
NAMES = ("boi_token", "eoi_token", "image_token")
SIDE, NUM_TOKENS = 56, 16
WINDOW = 12  # shorter than an image


def save_gemma3(folder: Path, seed: int = 0, **changes: Any) -> None:
    """Images of 56² pixels and 16 tokens, with ``changes`` of their texts."""
    tokenizer: Any = _tokenizer()
    text = text_config(tokenizer) | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
    }
    ids = dict(zip(NAMES, tokenizer.convert_tokens_to_ids([*MEDIA]), strict=True))
    config = transformers.Gemma3Config(
        text_config=text | changes,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 7,
            "vision_use_head": False,
        },
        mm_tokens_per_image=NUM_TOKENS,
        **{f"{name}_index": token for name, token in ids.items()},
    )
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    kind = transformers.Gemma3ForConditionalGeneration
    save(folder, kind, config, tokenizer, images, seed)
    strengthen(folder / "model.safetensors")


def strengthen(file: Path) -> None:
    """Layers add more to a token than its embedding has, which the output head has too."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            tensor.fill_(3.0)
    save_file(tensors, file, {"format": "pt"})


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Bytes, and tokens of two and of three line ends, so that texts around an image matter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    end = "Ċ"
    vocabulary = {token: number for number, token in enumerate([*alphabet, 2 * end, 3 * end])}
    core = Tokenizer(models.BPE(vocabulary, [(end, end), (2 * end, end)]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(each, special=True) for each in (*SPECIAL, *MEDIA)])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(zip(NAMES, MEDIA, strict=True)),
    )
    made.chat_template = TEMPLATE.replace(IMAGE, START)
    return made


@dataclass(frozen=True, slots=True)
class StretchedReference(Reference):
    def picture(self, seed: int, columns: int, rows: int) -> Image.Image:
        return picture(seed, SIDE, SIDE)

    def inputs(
        self, prompt: str, pictures: list, clips: Sequence[Clip] = (), **options: Any
    ) -> dict[str, torch.Tensor]:
        """By Gemma3Processor."""
        processor = transformers.Gemma3Processor(
            self.images, self.tokenizer, image_seq_length=NUM_TOKENS
        )
        found = processor(pictures or None, prompt, return_tensors="pt", **options)
        if not pictures:
            found.pop("token_type_ids", None)
        found.pop("num_crops", None)
        return dict(found)


@cache
def gemma3_reference(folder: Path) -> StretchedReference:
    return StretchedReference(*load_reference(folder))
