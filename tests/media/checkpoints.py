"""Tiny random checkpoints of families with images in their published layouts, pictures, and
transformers' texts for both."""

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.ernie4_5_vl_moe import image_processing_pil_ernie4_5_vl_moe
from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}" + IMAGE + ""
    "{% elif part.type == 'video' %}" + VIDEO + ""
    "{% elif 'text' in part %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
    """The classes of a family in transformers, the config of its tower, more keys of texts, and
    the names of the ids of ``MEDIA``."""

    config: Any
    model: Any
    images: Any
    vision: dict[str, Any]
    text: dict[str, Any] = AXES
    ids: tuple[str, ...] = IDS


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
STD = 0.2  # of random weights: large enough for a picture to change the text
MAX_LEN = 4096


def save_checkpoint(
    folder: Path, seed: int = 0, family: str = "qwen2.5-vl", **changes: Any
) -> None:
    """One of ``FAMILIES`` or ``WITH_STATES``, with ``changes`` of its texts. Weights of float32;
    images of 56² to 280² pixels."""
    parts = (FAMILIES | WITH_STATES)[family]
    tokenizer: Any = make_tokenizer()
    ids: Any = dict(zip(parts.ids, tokenizer.convert_tokens_to_ids([*MEDIA]), strict=True))
    text = text_config(tokenizer) | parts.text | changes
    config = parts.config(text_config=text, vision_config=parts.vision, **ids)
    patch, size = parts.vision["patch_size"], {"shortest_edge": 56 * 56, "longest_edge": 280 * 280}
    images = parts.images(patch_size=patch, size=size)
    save(folder, parts.model, config, tokenizer, images, seed)


def text_config(tokenizer: Any) -> dict[str, Any]:
    """Of a text part with two layers."""
    return {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": MAX_LEN,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.pad_token_id,
    }


def save(folder: Path, kind: Any, config: Any, tokenizer: Any, images: Any, seed: int) -> None:
    """A model of ``kind`` with random weights."""
    config.dtype = torch.float32
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "norm" not in name:
                parameter.normal_(0, STD)
            elif "bias" in name:
                parameter.normal_(0, 0.1)
            if "patch_embed" in name or "patch_conv" in name:
                parameter.mul_(2)
    model.generation_config.eos_token_id = config.get_text_config().eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)


def publish_ernie(folder: Path, copy: Path) -> None:
    """ERNIE-4.5-VL of ``folder`` with the config and the names of tensors as on the hub."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    text, vision = config.pop("text_config"), config.pop("vision_config")
    sparse = [layer for layer, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"]
    rotations = text.pop("rope_parameters")
    flat = config | text | {"model_type": "ernie4_5_moe_vl"}
    del flat["head_dim"], flat["image_token_id"], flat["video_token_id"]
    flat |= {
        "im_patch_id": config["image_token_id"],
        "rope_theta": rotations["rope_theta"],
        "freq_allocation": rotations["mrope_section"][2],
        "moe_num_experts": [text["moe_num_experts"]] * 2,
        "moe_layer_start_index": [sparse[0]] * 2,
        "moe_layer_end_index": [sparse[-1] - 1, sparse[-1]],
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
    }
    names = ("depth", "hidden_size", "hidden_act", "num_heads", "in_channels", "patch_size")
    ratio = vision["intermediate_size"] / vision["hidden_size"]
    flat["vision_config"] = {name: vision[name] for name in names} | {
        "model_type": "DFNRope_vision_transformer",
        "mlp_ratio": ratio,
        "spatial_merge_size": 2,
    }
    (copy / "config.json").write_text(json.dumps(flat))
    given = json.loads((folder / "preprocessor_config.json").read_text())
    size = given.pop("size")
    del given["temporal_patch_size"]
    given |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (copy / "preprocessor_config.json").write_text(json.dumps(given))
    tensors = load_file(folder / "model.safetensors")
    published = {
        name.replace("model.vision_model.", "vision_model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(published, copy / "model.safetensors", {"format": "pt"})


def preprocessor(folder: Path, copy: Path, **changes: Any) -> None:
    """Copies the files that a family reads, with ``changes`` of the preprocessor."""
    for name in ("config.json", "preprocessor_config.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Discs on a gradient."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    shades = [rows / height, columns / width, (rows + columns) / (height + width)]
    pixels = np.stack(shades, -1) * 255 * random.random(3)
    for _ in range(6):
        row, column, radius = random.random(3) * (height, width, min(height, width) / 2)
        is_inside = (rows - row) ** 2 + (columns - column) ** 2 < radius**2
        pixels[is_inside] = random.random(3) * 255
    return Image.fromarray(pixels.astype(np.uint8))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


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
        if isinstance(config, transformers.Ernie4_5_VLMoeConfig):
            of_images = [getattr(config, name) for name in ERNIE_IDS]
            kinds["moe_mm_token_type_ids"] = torch.isin(ids, torch.tensor(of_images)).int()
        return (
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            | found
            | (kinds if pictures or clips else {})
        )

    def _of_clips(self, clips: Sequence["Clip"]) -> dict[str, torch.Tensor]:
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
    for clip, (times, *sides), piece in zip(clips, grids, pieces, strict=True):
        num = int(np.prod(sides)) // 4
        groups = [f"{each}{MEDIA[0]}{MEDIA[3] * num}{MEDIA[1]}" for each in clip.labels]
        text += "".join(groups or [MEDIA[3] * num * int(times)]) + piece
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


def make_tokenizer(media: Sequence[str] = MEDIA, image: str = IMAGE) -> PreTrainedTokenizerFast:
    """Bytes, then special tokens. The template writes ``image`` for each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*SPECIAL, *media])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = TEMPLATE.replace(IMAGE, image)
    return made


if __name__ == "__main__":
    import sys

    save_checkpoint(Path(sys.argv[1]))
    print(json.dumps(sorted(path.name for path in Path(sys.argv[1]).iterdir())))
