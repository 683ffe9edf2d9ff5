"""The sizes that images are scaled to, and the choice of frames: vLLM's ``mm_processor_kwargs``.
Pure."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from shared.media.family import MAX_CROPS, SOFT_TOKENS, PixelLimits, VideoLimits
from shared.wire.messages import MAX_MEDIA, Detail

LOW_PIXELS = 512 * 512  # OpenAI's size of an image of low detail

NumPixels = Annotated[int, Meta(ge=1)]
Limits = TypeVar("Limits", PixelLimits, VideoLimits, PixelLimits | VideoLimits)


class _Size(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Areas, too."""

    shortest_edge: NumPixels | None = None
    longest_edge: NumPixels | None = None


class _Kwargs(msgspec.Struct, forbid_unknown_fields=True):
    min_pixels: NumPixels | None = None
    max_pixels: NumPixels | None = None
    size: _Size = _Size()
    fps: Annotated[float, Meta(ge=0.001, le=1000)] | None = None
    num_frames: Annotated[int, Meta(ge=1, le=2 * MAX_MEDIA)] | None = None
    do_pan_and_scan: bool | None = None
    pan_and_scan_min_crop_size: NumPixels | None = None
    pan_and_scan_max_num_crops: Annotated[int, Meta(ge=1, le=MAX_CROPS)] | None = None
    pan_and_scan_min_ratio_to_activate: Annotated[float, Meta(ge=0)] | None = None
    max_soft_tokens: int | None = None


def with_kwargs(limits: Limits, kwargs: str, options: Sequence[str], most: int = 0) -> Limits:
    """``limits`` with the values of a JSON object; areas are at most ``max_pixels``, or ``most``. A
    limit that is given alone moves the other one. ``options`` are the names that the model takes.
    Raises ValueError."""
    try:
        given = msgspec.json.decode(kwargs or "{}", type=_Kwargs)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    for name in given.__struct_fields__:
        if name not in options and getattr(given, name) != getattr(_Kwargs(), name):
            raise ValueError(
                f"{name} is not for this model; it takes {', '.join(options) or 'none'}"
            )
    least_given = given.min_pixels or given.size.shortest_edge
    most_given = given.max_pixels or given.size.longest_edge
    most = max(most, limits.max_pixels)
    for value in (least_given, most_given):
        if value is not None and value > most:
            raise ValueError(f"{value} pixels; the limit is {most}")
    if least_given is not None and most_given is not None and least_given > most_given:
        raise ValueError(f"min_pixels is {least_given}, above max_pixels, {most_given}")
    least, largest = least_given or limits.min_pixels, most_given or limits.max_pixels
    found = limits._replace(min_pixels=min(least, largest), max_pixels=largest)
    if given.fps is not None and given.num_frames is not None:
        raise ValueError("num_frames is given in addition to fps")
    if isinstance(found, VideoLimits) and given.fps is not None:
        return found._replace(fps=given.fps, listed_fps=given.fps, num_frames=None)
    if isinstance(found, VideoLimits) and given.num_frames is not None:
        return found._replace(num_frames=given.num_frames)
    if isinstance(found, PixelLimits) and found.soft_tokens and given.max_soft_tokens is not None:
        known = [each for each in SOFT_TOKENS if each <= found.soft_tokens]
        if given.max_soft_tokens not in known:
            raise ValueError(
                f"max_soft_tokens is {given.max_soft_tokens}; it may be"
                f" {', '.join(map(str, known))}"
            )
        return found._replace(soft_tokens=given.max_soft_tokens)
    if isinstance(found, PixelLimits) and found.scan is not None:
        values = {name: getattr(given, name) for name in found.scan._fields}
        values = {name: each for name, each in values.items() if each is not None}
        return found._replace(scan=found.scan._replace(**values))
    return found


def with_detail(limits: Limits, detail: Detail) -> Limits:
    if detail != "low":
        return limits
    least, most = (min(each, LOW_PIXELS) for each in (limits.min_pixels, limits.max_pixels))
    low = limits._replace(min_pixels=least, max_pixels=most)
    return low._replace(has_parts=False) if isinstance(low, PixelLimits) else low
