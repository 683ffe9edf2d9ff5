"""Tiny random checkpoints of families with images in their published layouts."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import ImageFont
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.media.families import FAMILIES, WITH_STATES

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
STD = 0.2  # of random weights: large enough for a picture to change the text
MAX_LEN = 4096
VIDEO_FILE = "video_preprocessor_config.json"


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
    if parts.videos is not None:
        (folder / VIDEO_FILE).write_text(json.dumps(parts.videos | {"size": size}))
        font = ImageFont.load_default(10)
        assert isinstance(font, ImageFont.FreeTypeFont)
        (folder / parts.videos["font"]).write_bytes(font.font_bytes)


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
    """ERNIE-4.5-VL of ``folder`` with the config, the template and the names of tensors as on the
    hub. Images and videos have the same placeholder."""
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
    for name in (VIDEO_FILE, "Roboto-Regular.ttf"):
        (copy / name).unlink()
    template = copy / "chat_template.jinja"
    source = template.read_text().replace(MEDIA[2], "<|image@placeholder|>")
    template.write_text(source.replace(MEDIA[3], "<|video@placeholder|>"))
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


def nest(folder: Path) -> None:
    """As newer versions of transformers save: images and videos are described in the processor's
    file."""
    files = {"image_processor": folder / "preprocessor_config.json"}
    if (folder / VIDEO_FILE).exists():
        files["video_processor"] = folder / VIDEO_FILE
    nested = {name: json.loads(file.read_text()) for name, file in files.items()}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    for file in files.values():
        file.unlink()


def make_tokenizer(
    media: Sequence[str] = MEDIA, image: str = IMAGE, video: str = VIDEO
) -> PreTrainedTokenizerFast:
    """Bytes, then special tokens. The template writes ``image`` for each, or ``video``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*SPECIAL, *media])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = TEMPLATE.replace(IMAGE, image).replace(VIDEO, video)
    return made


if __name__ == "__main__":
    import sys

    save_checkpoint(Path(sys.argv[1]))
    print(json.dumps(sorted(path.name for path in Path(sys.argv[1]).iterdir())))
