"""Images of GLM-4.1V to 4.6V (arXiv 2507.01006) and GLM-OCR. Pure."""

from pathlib import Path
from typing import ClassVar, Self

from shared.media.family import Fit, PixelLimits, check_ratio
from shared.media.qwen2_5_vl import SquaresOfPatches

NUM_FRAMES = 2  # of an image, in the areas of a file


class RepeatedSquares(SquaresOfPatches):
    """Images with a side shorter than a token are enlarged first."""

    default_limits: ClassVar = PixelLimits(112 * 112, 28 * 28 * 15000)
    options: tuple[str, ...] = ("min_pixels", "max_pixels")

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        check_ratio(width, height)
        if min(width, height) < self.side:
            scale = max(self.side / height, self.side / width)
            width, height = int(width * scale), int(height * scale)
        return super().fit(width, height, limits)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        made = super().read(folder)
        least, most = made.limits[:2]
        made.limits = PixelLimits(least // NUM_FRAMES, most // NUM_FRAMES)
        return made
