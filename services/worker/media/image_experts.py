"""Checkpoints of ERNIE-4.5-VL: experts of texts and of images in one list, as published, or as
transformers' modules have them."""

import re
from collections.abc import Callable

from torch import Tensor

from services.worker.config.model_config import ModelConfig
from services.worker.media.ernie4_5_vl import Ernie4_5_VLMoeForConditionalGeneration
from services.worker.weights.checkpoint import Checkpoint, TensorSource

OUR_EXPERT = re.compile(r"(?P<layer>.+\.mlp\.)images\.experts\.(?P<expert>\d+)\.(?P<rest>.+)")
IMAGES = ".mlp.images."
OF_IMAGES = re.compile(r"\.mlp\.(gate\.weight_1$|vision_moe\.)|\.mlp\.experts\.(?P<expert>\d+)\.")
TRANSFORMERS = {
    f"{IMAGES}moe_statics.": ".mlp.vision_moe.gate.moe_statics.",
    IMAGES: ".mlp.vision_moe.",
    ".mlp.moe_statics.": ".mlp.text_moe.gate.moe_statics.",
    ".mlp.gate.": ".mlp.text_moe.gate.",
    ".mlp.experts.": ".mlp.text_moe.experts.",
}


class ImageExperts(Checkpoint):
    """A view of ``checkpoint``, which has ``num`` experts of each kind in a layer; without those of
    images, if none is ``wanted``."""

    def __init__(self, checkpoint: Checkpoint, num: int, *, wanted: bool) -> None:
        tensors = checkpoint.tensors
        if not wanted:
            tensors = {name: tensors[name] for name in tensors if not _is_of_images(name, num)}
        super().__init__(checkpoint.folder, tensors)
        self._checkpoint, self._num = checkpoint, num
        self._is_transformers = any(".mlp.text_moe." in name for name in tensors)

    def source(self, name: str) -> TensorSource:
        if self._is_transformers:
            for ours, theirs in TRANSFORMERS.items():
                if ours in name:
                    return self._checkpoint.source(name.replace(ours, theirs))
            return self._checkpoint.source(name)
        kind = int(IMAGES in name)
        if found := OUR_EXPERT.fullmatch(name):
            expert = self._num + int(found["expert"])
            return self._checkpoint.source(f"{found['layer']}experts.{expert}.{found['rest']}")
        name = name.replace(IMAGES, ".mlp.")
        if name.endswith(".mlp.gate.weight"):
            source = self._checkpoint.source(name + "_1" * kind)
            return source._replace(transform=lambda whole: whole.T)
        source = self._checkpoint.source(name)
        if ".mlp.moe_statics." in name:
            return source._replace(transform=half(kind))
        return source


def view(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` by our names."""
    assert isinstance(config, Ernie4_5_VLMoeForConditionalGeneration.Config)
    return ImageExperts(checkpoint, config.num_routed_experts, wanted=config.reads_images)


def half(number: int) -> Callable[[Tensor], Tensor]:
    return lambda whole: whole.chunk(2)[number]


def _is_of_images(name: str, num: int) -> bool:
    found = OF_IMAGES.search(name)
    return found is not None and (found["expert"] is None or int(found["expert"]) >= num)
