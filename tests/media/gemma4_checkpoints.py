"""Tiny random checkpoints of Gemma 4 with images, and transformers' texts for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.masking_utils import create_masks_for_generate
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4_unified import modeling_gemma4_unified as unified

from tests.media.checkpoints import make_tokenizer, save, text_config
from tests.media.gemma3_checkpoints import strengthen
from tests.media.references import Clip, Expected, Reference, load_reference
from tests.media.videos import metadata, processor_of, without_torchvision

START, END, TOKEN, VIDEO = MEDIA = "<|image>", "<image|>", "<|image|>", "<|video|>"
NAMES = ("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id")
PATCH, POOL, NUM_TOKENS = 4, 3, 70
SIDE = PATCH * POOL
WINDOW = 20  # shorter than an image
SLIDING, FULL = "sliding_attention", "full_attention"
WHOLE: dict[str, Any] = {
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
SMALL: dict[str, Any] = {
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
SOUNDS = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 32,
}


def save_gemma4(folder: Path, seed: int = 0, **changes: Any) -> None:
    """Images of 70 tokens at most, with ``changes`` of their texts: by default as of the larger
    models, whose tokens see each other in images. With inputs of layers it has a tower of sounds
    too."""
    tokenizer: Any = make_tokenizer(MEDIA, TOKEN, VIDEO)
    text = text_config(tokenizer) | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL] * 2,
        "global_head_dim": 32,
        "sliding_window": WINDOW,
        "vocab_size_per_layer_input": len(tokenizer),
    }
    text |= changes or WHOLE
    ids = _ids(tokenizer)
    is_small = bool(text["hidden_size_per_layer_input"])
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": PATCH,
            "pooling_kernel_size": POOL,
            "position_embedding_size": NUM_TOKENS * POOL,
            "use_clipped_linears": is_small,
            "standardize": not is_small,
        },
        audio_config=SOUNDS if is_small else None,
        **ids,
    )
    save(folder, transformers.Gemma4ForConditionalGeneration, config, tokenizer, _images(), seed)
    _finish(folder / "model.safetensors", tokenizer)


def save_unified(folder: Path, seed: int = 0, **changes: Any) -> None:
    """As ``save_gemma4``, of the model that has no tower."""
    tokenizer: Any = make_tokenizer(MEDIA, TOKEN, VIDEO)
    text = text_config(tokenizer) | {
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL] * 2,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "sliding_window": WINDOW,
    }
    config = transformers.Gemma4UnifiedConfig(
        text_config=text | changes,
        vision_config={
            "patch_size": PATCH,
            "pooling_kernel_size": POOL,
            "mm_embed_dim": 32,
            "output_proj_dims": 32,
            "mm_posemb_size": NUM_TOKENS,
        },
        audio_config={"audio_embed_dim": 32},
        **_ids(tokenizer),
    )
    kind = transformers.Gemma4UnifiedForConditionalGeneration
    save(folder, kind, config, tokenizer, _images(), seed)
    _finish(folder / "model.safetensors", tokenizer)


def _finish(file: Path, tokenizer: Any) -> None:
    """Placeholders are not generated: in a text, transformers embeds them as padding."""
    strengthen(file)
    tensors = load_file(file)
    (name,) = (each for each in tensors if each.endswith(".embed_tokens.weight"))
    tensors[name][tokenizer.convert_tokens_to_ids([TOKEN, VIDEO])] = 0
    save_file(tensors, file, {"format": "pt"})


def _ids(tokenizer: Any) -> Any:
    return dict(zip(NAMES, tokenizer.convert_tokens_to_ids([*MEDIA]), strict=True))


def _images() -> Any:
    file: Any = {"patch_size": PATCH, "pooling_kernel_size": POOL, "max_soft_tokens": NUM_TOKENS}
    return Gemma4ImageProcessorPil(**file)


INPUTS = (
    *("pixel_values", "image_position_ids"),
    *("pixel_values_videos", "video_position_ids", "num_frames_per_video"),
)
KINDS = {"gemma4": "Gemma4VideoProcessor", "gemma4_unified": "Gemma4UnifiedVideoProcessor"}


def _replaced(text: str, token: str, write: Callable[[int], str]) -> str:
    first, *pieces = text.split(token)
    return first + "".join(write(number) + piece for number, piece in enumerate(pieces))


@dataclass(frozen=True, slots=True)
class FilledReference(Reference):
    @property
    def side(self) -> int:
        return SIDE

    def inputs(
        self, prompt: str, pictures: list, clips: Sequence[Clip] = (), **options: Any
    ) -> dict[str, torch.Tensor]:
        """By Gemma4Processor's replacement of a token."""
        given = self.patches(pictures, **options) if pictures else {}
        of_clips = self.patches_of_frames(clips) if clips else {}
        texts: Any = SimpleNamespace(
            boi_token=START, image_token=TOKEN, video_token=VIDEO, eoi_token=END
        )
        text = _replaced(prompt, TOKEN, partial(Gemma4Processor.replace_image_token, texts, given))
        write = partial(Gemma4Processor.replace_video_token, texts, of_clips)
        ids = self.tokenizer(_replaced(text, VIDEO, write), return_tensors="pt")["input_ids"]
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        names = [name for name in (*given, *of_clips) if name in INPUTS]
        found |= {name: torch.as_tensor((given | of_clips)[name]) for name in names}
        if pictures or clips:
            config = self.model.config
            kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
            found["mm_token_type_ids"] = kinds
        return found

    def patches_of_frames(self, clips: Sequence[Clip]) -> dict[str, Any]:
        """By transformers' processor of videos, with frames that are not resized."""
        kind = self.model.config.model_type
        with mock.patch.object(transformers.utils, "is_torchvision_v2_available"):
            processor = getattr(processor_of(kind), KINDS[kind])
        resize = partial(processor.aspect_ratio_preserving_resize, None)
        steps: Any = SimpleNamespace(
            aspect_ratio_preserving_resize=resize,
            rescale_and_normalize=lambda video, _, factor, *__: video * factor,
        )
        frames = [np.stack([np.asarray(frame) for frame in clip.frames]) for clip in clips]
        found = processor._preprocess(
            steps,
            [torch.from_numpy(each).permute(0, 3, 1, 2) for each in frames],
            do_resize=True,
            resample=None,
            do_rescale=True,
            rescale_factor=1 / 255,
            do_normalize=True,
            image_mean=None,
            image_std=None,
            return_tensors="pt",
            patch_size=PATCH,
            max_soft_tokens=NUM_TOKENS,
            pooling_kernel_size=POOL,
        )
        about = [metadata(len(clip.frames), 1 / clip.seconds) for clip in clips]
        for each in about:
            each.frames_indices = range(each.total_num_frames)
        return dict(found) | {"video_metadata": about}

    def patches(self, pictures: list, **options: Any) -> dict[str, Any]:
        return dict(self.images(images=pictures, return_tensors="pt", **options))


class UnifiedReference(FilledReference):
    def expect(self, *args: Any, **options: Any) -> Expected:
        """With the masks that transformers makes ahead for compiled models. Others of this version
        have tokens of images see each other in all layers."""
        with mock.patch.object(unified, "create_masks_for_generate", _masks):
            return super().expect(*args, **options)

    def patches(self, pictures: list, **options: Any) -> dict[str, Any]:
        """By the functions of Gemma4UnifiedImageProcessor, which as a whole needs torchvision."""
        name = "transformers.models.gemma4_unified.image_processing_gemma4_unified"
        module = without_torchvision(name)
        found = super().patches(pictures, **options)
        images = zip(found["pixel_values"], found["image_position_ids"], strict=True)
        merged = []
        for patches, places in images:
            is_there = places[:, 0] >= 0
            num = int(is_there.sum()) // POOL**2
            one, where = module.patches_merge(patches[None, is_there], places[None, is_there], num)
            merged.append(module.pad_along_first_dim(one[0], where[0], NUM_TOKENS))
        pixels, positions = (torch.stack(each) for each in zip(*merged, strict=True))
        return found | {"pixel_values": pixels, "image_position_ids": positions}


def _masks(block_sequence_ids: torch.Tensor | None = None, **given: Any) -> Any:
    if block_sequence_ids is None:
        return create_masks_for_generate(**given)
    return unified.create_masks_for_vision_model(block_sequence_ids=block_sequence_ids, **given)


@cache
def gemma4_reference(folder: Path) -> FilledReference:
    fields = load_reference(folder)
    is_unified = fields[0].config.model_type == "gemma4_unified"
    return (UnifiedReference if is_unified else FilledReference)(*fields)
