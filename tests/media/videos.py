"""Short videos, and transformers' video processors."""

import importlib.util
import io
import struct
import sys
from collections.abc import Sequence
from fractions import Fraction
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import video_utils
from transformers.utils.import_utils import is_torchvision_available

from tests.media.pictures import picture

needs_av = pytest.mark.skipif(
    importlib.util.find_spec("av") is None, reason="the package av encodes the videos"
)


def processor_of(name: str) -> Any:
    """The module of a video processor."""
    return without_torchvision(f"transformers.models.{name}.video_processing_{name}")


def without_torchvision(module: str) -> Any:
    """A module of transformers whose pure functions need no torchvision, only its import."""
    assert not is_torchvision_available()
    modules: dict[str, Any] = {}
    for part in ("torchvision", "transforms", "v2", "functional"):
        parent = next(reversed(modules), "")
        modules[f"{parent}.{part}".lstrip(".")] = made = ModuleType(part)
        if parent:
            setattr(modules[parent], part, made)
    made.InterpolationMode = None  # type: ignore[attr-defined]
    functional: Any = ModuleType("functional")
    functional.to_pil_image = lambda frame: Image.fromarray(frame.permute(1, 2, 0).numpy())
    functional.pil_to_tensor = lambda image: torch.tensor(np.asarray(image)).permute(2, 0, 1)
    modules["torchvision.transforms.functional"] = functional
    sys.modules.update(modules)
    try:
        return import_module(module)
    finally:
        for each in modules:
            del sys.modules[each]


def stamped(font: str, frames: Sequence[Image.Image], fps: float) -> list[Image.Image]:
    """All frames of a film, with their times as transformers' processor of ERNIE-4.5-VL draws
    them."""
    processor = processor_of("ernie4_5_vl_moe").Ernie4_5_VLMoeVideoProcessor
    made = []
    for number, frame in enumerate(frames):
        time = processor._convert_timestamp(None, torch.tensor(number) / fps)
        pixels = torch.tensor(np.asarray(frame)).permute(2, 0, 1)
        found = processor._render_image_with_timestamp(SimpleNamespace(font=font), pixels, time)
        made.append(Image.fromarray(found.permute(1, 2, 0).numpy()))
    return made


def metadata(num_frames: int, fps: float) -> Any:
    return video_utils.VideoMetadata(total_num_frames=num_frames, fps=fps)


def scene(seed: int, num_frames: int, width: int, height: int) -> list[Image.Image]:
    """A picture that another one slides over."""
    under, over = picture(seed, width, height), picture(seed + 100, width, height)
    frames = []
    for number in range(num_frames):
        frame = under.copy()
        frame.paste(over, (width * (number + 1) // (num_frames + 1), 0))
        frames.append(frame)
    return frames


def encoded(
    frames: Sequence[Image.Image], fps: float = 4.0, kind: str = "mp4", codec: str = "libx264"
) -> bytes:
    """A file with a key frame every few frames."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        rate = Fraction(fps).limit_denominator(1000)
        stream: Any = container.add_stream(codec, rate=rate, options={"g": "5"})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return file.getvalue()


def index_first(file: bytes) -> bytes:
    """An MP4 with its index before its frames, so that a cut costs frames alone."""
    place, index = file.index(b"mdat") - 4, file.index(b"moov") - 4
    moved = bytearray(file[index:])
    start = moved.index(b"stco") + 8
    (num,) = struct.unpack_from(">I", moved, start)
    offsets = struct.unpack_from(f">{num}I", moved, start + 4)
    struct.pack_into(f">{num}I", moved, start + 4, *(each + len(moved) for each in offsets))
    return file[:place] + bytes(moved) + file[place:index]


def decoded(file: bytes) -> list[Image.Image]:
    """All frames, as transformers' reader with PyAV decodes them."""
    import av

    with av.open(io.BytesIO(file), "r") as container:
        return [
            Image.fromarray(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)
        ]
