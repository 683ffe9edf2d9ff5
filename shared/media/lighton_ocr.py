"""Images of LightOnOCR (arXiv 2601.14251). Pure."""

from pathlib import Path
from typing import Self

import numpy as np

from shared.errors import ConfigError
from shared.media.family import PREPROCESSOR_FILE, Size, squares_of
from shared.media.pixtral import Config, Preprocessor, RowsOfPatches


class UnbrokenRows(RowsOfPatches):
    """Sides are multiples of the patches in the preprocessor's file. Pixels behind the last whole
    token, of ``side_of_token``, are left out."""

    def __init__(self, placeholder: int, side: int, side_of_token: int, longest: int) -> None:
        super().__init__([placeholder] * 3, side, longest)
        self._side_of_token = side_of_token

    def num_tokens(self, size: Size) -> int:
        _, height, width = size
        squares_of(size, self._side)
        side = self._side_of_token
        if min(height, width) < side:
            raise ValueError(
                f"is scaled to {width} x {height} pixels; a token has {side} x {side} of them"
            )
        return (height // side) * (width // side)

    def ids(self, size: Size) -> np.ndarray:
        return np.full(self.num_tokens(size), self.placeholder, np.int32)

    @classmethod
    def make(cls, folder: Path, config: Config, given: Preprocessor, longest: int) -> Self:
        if given.side < 1:
            raise ConfigError(
                f"model: {folder / PREPROCESSOR_FILE}: patch_size {given.patch_size} is no square"
            )
        side_of_token = config.vision_config.patch_size * config.merge
        return cls(config.find(folder), given.side, side_of_token, longest)
