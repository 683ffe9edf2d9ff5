"""transformers' texts for chats with pictures and videos."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests.media.checkpoints import MEDIA
from tests.media.families import ERNIE_IDS
from tests.media.pictures import picture


@dataclass(frozen=True, slots=True)
class Expected:
    """transformers' result for a chat: the ids of the prompt, of the text, and the text."""

    prompt_ids: list[int]
    ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """transformers' model on a checkpoint, in float32."""

    model: Any
    tokenizer: Any
    images: Any

    @property
    def side(self) -> int:
        """The pixels of a token are a square."""
        side: int = self.images.patch_size * self.images.merge_size
        return side

    def picture(self, seed: int, columns: int, rows: int) -> Image.Image:
        """Of whole squares, so that it is not resized."""
        return picture(seed, columns * self.side, rows * self.side)

    def frames(self, picture: Image.Image) -> list[Image.Image]:
        """Of a picture that is not resized."""
        return [picture]

    def items(self, picture: Image.Image) -> list[list[Image.Image]]:
        """The frames of each item."""
        return [self.frames(picture)]

    def expect(
        self,
        messages: list[dict[str, object]],
        pictures: list,
        num_tokens: int,
        clips: Sequence["Clip"] = (),
    ) -> Expected:
        """The greedy text of a chat with ``pictures`` as its parts of type ``image``, in order,
        and ``clips`` as those of type ``video``."""
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        inputs = self.inputs(prompt, pictures, clips)
        ids = inputs["input_ids"]
        with torch.inference_mode():
            found = self.model.generate(**inputs, do_sample=False, max_new_tokens=num_tokens)
        new = found[0, ids.shape[1] :].tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        return Expected(ids[0].tolist(), new, text)

    def inputs(
        self, prompt: str, pictures: list, clips: Sequence["Clip"] = ()
    ) -> dict[str, torch.Tensor]:
        """The placeholder of each picture is repeated, as the families' processors do, of which
        some need torchvision."""
        found = dict(self.images(images=pictures, return_tensors="pt")) if pictures else {}
        if clips:
            found |= self._of_clips(clips)
        text = _repeated(prompt, MEDIA[2], found.get("image_grid_thw", ()))
        text = _with_clips(text, clips, found.get("video_grid_thw", ()))
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        config = self.model.config
        of_videos = 2 * (ids == config.video_token_id).int()
        kinds = {"mm_token_type_ids": (ids == config.image_token_id).int() + of_videos}
        if self._is_ernie:
            of_images = [getattr(config, name) for name in ERNIE_IDS]
            kinds["moe_mm_token_type_ids"] = torch.isin(ids, torch.tensor(of_images)).int()
        return (
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            | found
            | (kinds if pictures or clips else {})
        )

    def _of_clips(self, clips: Sequence["Clip"]) -> dict[str, torch.Tensor]:
        if self._is_ernie:  # its frames have patches as images have them
            given = [self.images(images=[*clip.frames], return_tensors="pt") for clip in clips]
            grids = [each["image_grid_thw"] for each in given]
            return {
                "pixel_values_videos": torch.cat([each["pixel_values"] for each in given]),
                "video_grid_thw": torch.tensor(
                    [[len(grid), *grid[0, 1:].tolist()] for grid in grids]
                ),
            }
        from tests.media.videos import processor_of

        merge, found = self.images.merge_size, []
        mean, std = (torch.tensor(each)[:, None, None] for each in self._shades)
        for clip in clips:
            frames = np.stack([np.asarray(frame) for frame in clip.frames])
            values = (torch.from_numpy(frames).permute(0, 3, 1, 2) / 255 - mean) / std
            patchify = processor_of("qwen2_vl").Qwen2VLVideoProcessor.patchify
            found.append(patchify(None, values[None], self.images.patch_size, merge, 2))
        return {
            "pixel_values_videos": torch.cat([patches[0] for patches, *_ in found]),
            "video_grid_thw": torch.tensor([grid for _, *grid in found]),
        } | ({} if clips[0].labels else {"second_per_grid_ts": _seconds(clips)})

    @property
    def _is_ernie(self) -> bool:
        return isinstance(self.model.config, transformers.Ernie4_5_VLMoeConfig)

    @property
    def _shades(self) -> tuple[list[float], list[float]]:
        return self.images.image_mean, self.images.image_std


@dataclass(frozen=True, slots=True)
class Clip:
    """A video whose frames are not resized. Pairs of them are ``seconds`` apart, or have
    ``labels``."""

    frames: Sequence[Image.Image]
    seconds: float = 1.0
    labels: Sequence[str] = ()


def _seconds(clips: Sequence[Clip]) -> torch.Tensor:
    return torch.tensor([clip.seconds for clip in clips])


def _with_clips(prompt: str, clips: Sequence[Clip], grids: Any) -> str:
    """A grid with labels is written as one for each of its times."""
    first, *pieces = prompt.split(MEDIA[3])
    assert len(pieces) == len(clips)
    text = first
    for clip, (_, *sides), piece in zip(clips, grids, pieces, strict=True):
        num = int(np.prod(sides)) // 4
        groups = [f"{each}{MEDIA[0]}{MEDIA[3] * num}{MEDIA[1]}" for each in clip.labels]
        text += "".join(groups or [MEDIA[3] * num * (len(clip.frames) // 2)]) + piece
    return text


def _repeated(prompt: str, token: str, grids: Any) -> str:
    pieces = prompt.split(token)
    assert len(grids) == len(pieces) - 1
    text = pieces[0]
    for grid, piece in zip(grids, pieces[1:], strict=True):
        text += token * (int(grid.prod()) // 4) + piece
    return text


@cache
def reference(folder: Path) -> Reference:
    return Reference(*load_reference(folder))


def load_reference(folder: Path) -> tuple[Any, Any, Any]:
    """The fields of a Reference."""
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return model.eval(), tokenizer, images
