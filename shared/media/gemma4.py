"""Images and videos of Gemma 4: an image or a frame is scaled to as many tokens as fit a number of
them. Pure."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import msgspec
from msgspec import UNSET, UnsetType

from shared.errors import ConfigError
from shared.media.family import (
    BICUBIC,
    SOFT_TOKENS,
    Family,
    Fit,
    Mark,
    PixelLimits,
    Size,
    check_ratio,
    read_preprocessor_file,
    squares_of,
)
from shared.media.gemma4_videos import LabelledFrames, read_video_limits
from shared.media.llava import added_texts, all_added
from shared.model_folder import CONFIG_FILE, decode_json, find_file
from shared.wire.messages import MediumKind

WHOLE = "vision"  # attention among the tokens of an image


class _Preprocessor(msgspec.Struct):
    """What it leaves out is the processor's."""

    patch_size: int = 16
    pooling_kernel_size: int = 3
    max_soft_tokens: int = 280
    do_resize: bool = True
    resample: int = BICUBIC

    def problem(self) -> str:
        if not self.do_resize or self.resample != BICUBIC:
            return f"images without do_resize or resample {BICUBIC}"
        if self.max_soft_tokens not in SOFT_TOKENS:
            return f"max_soft_tokens is {self.max_soft_tokens}; it may be one of {SOFT_TOKENS}"
        if min(self.patch_size, self.pooling_kernel_size) < 1:
            return (
                f"patch_size is {self.patch_size} and pooling_kernel_size"
                f" {self.pooling_kernel_size}; they may be 1 or more"
            )
        return ""


class _Text(msgspec.Struct):
    use_bidirectional_attention: str | UnsetType | None = UNSET
    pad_token_id: int | None = 0


class _Config(msgspec.Struct):
    """config.json"""

    text_config: _Text = msgspec.field(default_factory=_Text)
    boi_token_id: int = 255_999
    eoi_token_id: int = 258_882
    image_token_id: int = 258_880
    video_token_id: int | None = 258_884


class FilledRows(Family):
    """A token for each square of ``side`` × ``side`` pixels. Inputs other than embeddings
    have the id ``filler`` at an image. ``texts`` are of the start, a token, and the end."""

    options: tuple[str, ...] = ("max_soft_tokens",)
    attention: ClassVar[str | None] = None  # by default
    before_crops = behind_first = between = ""  # an image has no parts

    def __init__(
        self,
        placeholder: int,
        filler: int,
        side: int,
        most: int,
        texts: Sequence[str],
        *,
        are_whole: bool,
    ) -> None:
        self.placeholder = placeholder
        self.filler: int | None = filler
        self.are_whole = are_whole
        self.limits = PixelLimits(1, most * side * side, soft_tokens=most)
        self.side = side
        self.marks: Mapping[MediumKind, Mark] = {"image": Mark(texts[1], "".join(texts))}

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        check_ratio(width, height)
        side = self.side
        most = min(limits.soft_tokens or SOFT_TOKENS[0], limits.max_pixels // side**2)
        num = max((each for each in SOFT_TOKENS if each <= most), default=SOFT_TOKENS[0])
        # In the order of transformers' operations, whose rounding it shares.
        scale = math.sqrt(num * side**2 / (height * width))
        rows, columns = (math.floor(scale * each / side) for each in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, num)
        elif columns == 0:
            rows, columns = min(height // width, num), 1
        return Fit((1, rows * side, columns * side), rows * columns)

    def num_tokens(self, size: Size) -> int:
        rows, columns = squares_of(size, self.side)
        return rows * columns

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        config = decode_json(find_file(folder, CONFIG_FILE), _Config)
        path, given = read_preprocessor_file(folder, _Preprocessor)
        if problem := given.problem():
            raise ConfigError(f"model: {path}: {problem}")
        token, text = config.image_token_id, config.text_config
        attention = text.use_bidirectional_attention
        start, image, end = added_texts(folder, config.boi_token_id, token, config.eoi_token_id)
        made = cls(
            token,
            text.pad_token_id or 0,
            given.patch_size * given.pooling_kernel_size,
            given.max_soft_tokens,
            (start, image, end),
            are_whole=(cls.attention if attention is UNSET else attention) == WHOLE,
        )
        of_video = config.video_token_id
        if of_video is not None and (video := all_added(folder).get(of_video)) is not None:
            limits = read_video_limits(folder, made.side)
            made.videos = LabelledFrames(of_video, (start, end), limits, made.fit)
            made.marks = {**made.marks, "video": Mark(video, made.videos.written(video))}
            made.kinds = ("image", "video")
        return made


class WholeRows(FilledRows):
    """The tokens of an image see each other by default."""

    attention = WHOLE
