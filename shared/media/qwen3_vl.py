"""Images of Qwen3-VL (arXiv 2511.21631). Pure."""

from pathlib import Path
from typing import Self

import msgspec

from shared.errors import ConfigError
from shared.media.qwen2_5_vl import SquaresOfPatches
from shared.model_folder import CONFIG_FILE, decode_json, find_file


class _Vision(msgspec.Struct):
    depth: int = 27
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    def problem(self) -> str:
        deep = self.deepstack_visual_indexes
        if len({*deep}) == len(deep) and all(0 <= each < self.depth for each in deep):
            return ""
        return (
            f"deepstack_visual_indexes {[*deep]} must be different layers of the tower, 0 to"
            f" {self.depth - 1}"
        )


class _Config(msgspec.Struct):
    vision_config: _Vision = msgspec.field(default_factory=_Vision)


class DeepSquares(SquaresOfPatches):
    """Inner layers of the tower give features too (DeepStack, arXiv 2406.04334)."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        path = find_file(folder, CONFIG_FILE)
        vision, made = decode_json(path, _Config).vision_config, super().read(folder)
        if problem := vision.problem():
            raise ConfigError(f"model: {path}: {problem}")
        made.num_embeddings = 1 + len(vision.deepstack_visual_indexes)
        return made
