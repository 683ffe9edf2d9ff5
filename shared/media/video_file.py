"""The files that describe how videos are read. Pure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.media.family import BICUBIC, PROCESSOR_FILE, VideoLimits, read_preprocessor_file
from shared.model_folder import decode_json

VIDEO_FILE = "video_preprocessor_config.json"
GROUP = 2  # frames of an item
# Workers compute frames as they compute images.
COMMON = (
    "patch_size",
    "merge_size",
    "temporal_patch_size",
    "image_mean",
    "image_std",
    "rescale_factor",
)


class _Processor(msgspec.Struct):
    video_processor: dict[str, Any] | None = None


class _Videos(msgspec.Struct):
    """``size`` holds areas."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    size: dict[str, Any] | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    do_resize: bool = True
    resample: int = BICUBIC


def read_limits(folder: Path, defaults: VideoLimits) -> VideoLimits:
    """From the first of the files that transformers looks for; the last one is of images. Raises
    ConfigError."""
    path, found = find_file_of_videos(folder) or read_preprocessor_file(folder, dict[str, Any])
    return limits_in(path, found, defaults)


def limits_in(
    path: Path, found: dict[str, Any], defaults: VideoLimits, common: Sequence[str] = COMMON
) -> VideoLimits:
    """From the content ``found`` of the file ``path``, whose values in ``common`` must equal the
    images' own. Raises ConfigError."""
    images = read_preprocessor_file(path.parent, dict[str, Any])[1]
    for name in common:
        if name in found and name in images and found[name] != images[name]:
            raise ConfigError(
                f"model: {path}: {name} is {found[name]}, and {images[name]} for images"
            )
    if (group := found.get("temporal_patch_size", GROUP)) != GROUP:
        raise ConfigError(f"model: {path}: temporal_patch_size is {group}; it must be {GROUP}")
    try:
        given = msgspec.convert(found, _Videos)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {path}: {error}") from None
    if not given.do_resize or given.resample != BICUBIC:
        raise ConfigError(f"model: {path}: videos without do_resize, or resample not {BICUBIC}")
    size = given.size or {}
    return VideoLimits(
        given.min_pixels or size.get("shortest_edge") or defaults.min_pixels,
        given.max_pixels or size.get("longest_edge") or defaults.max_pixels,
        given.fps or defaults.fps,
        given.num_frames or defaults.num_frames,
        given.min_frames or defaults.min_frames,
        given.max_frames or defaults.max_frames,
    )


def find_file_of_videos(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The file and its content. Raises ConfigError."""
    path = folder / PROCESSOR_FILE
    if path.is_file() and (nested := decode_json(path, _Processor).video_processor) is not None:
        return path, nested
    path = folder / VIDEO_FILE
    return (path, decode_json(path, dict[str, Any])) if path.is_file() else None
