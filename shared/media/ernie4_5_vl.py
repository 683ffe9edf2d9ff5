"""Images of ERNIE-4.5-VL (technical report of June 2025). Pure."""

from pathlib import Path
from typing import ClassVar, Self

import msgspec

from shared.media.family import PixelLimits
from shared.media.qwen2_5_vl import SquaresOfPatches
from shared.model_folder import CONFIG_FILE, decode_json, find_file


class _Config(msgspec.Struct):
    """The published ids, which its files often leave out."""

    image_start_token_id: int = 101304
    image_end_token_id: int = 101305
    video_start_token_id: int = 101306
    video_end_token_id: int = 101307
    video_token_id: int = 103367


class ErnieSquares(SquaresOfPatches):
    """Experts of images serve the tokens of an image and the ids around it."""

    default_limits: ClassVar = PixelLimits(56 * 56, 28 * 28 * 6177)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        made = super().read(folder)
        ids = msgspec.structs.astuple(decode_json(find_file(folder, CONFIG_FILE), _Config))
        made.image_ids = (made.placeholder, *ids)
        return made
