"""Images of PaddleOCR-VL (arXiv 2510.14528). Pure."""

from typing import ClassVar

from shared.media.family import Fit, PixelLimits, check_ratio
from shared.media.qwen2_5_vl import SquaresOfPatches


class RaisedSquares(SquaresOfPatches):
    """Sides shorter than a token are raised to one before an image is scaled."""

    default_limits: ClassVar = PixelLimits(384 * 384, 1536 * 1536)

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        check_ratio(width, height)
        if height < self.side:
            width, height = round(width * self.side / height), self.side
        if width < self.side:
            width, height = self.side, round(height * self.side / width)
        return super().fit(width, height, limits)
