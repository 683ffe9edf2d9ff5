"""The sizes that images are scaled to: vLLM's ``mm_processor_kwargs``. Pure."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.media.family import PixelLimits
from shared.wire.messages import Detail

LOW_PIXELS = 512 * 512  # OpenAI's size of an image of low detail

NumPixels = Annotated[int, Meta(ge=1)]


class _Size(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Areas, too."""

    shortest_edge: NumPixels | None = None
    longest_edge: NumPixels | None = None


class _Kwargs(msgspec.Struct, forbid_unknown_fields=True):
    min_pixels: NumPixels | None = None
    max_pixels: NumPixels | None = None
    size: _Size = _Size()


def with_kwargs(limits: PixelLimits, kwargs: str, options: Sequence[str]) -> PixelLimits:
    """``limits`` with the values of a JSON object, of which each is at most ``max_pixels``. A limit
    that is given alone moves the other one. ``options`` are the names that the model takes. Raises
    ValueError."""
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
    for value in (least_given, most_given):
        if value is not None and value > limits.max_pixels:
            raise ValueError(f"{value} pixels; the limit is {limits.max_pixels}")
    if least_given is not None and most_given is not None and least_given > most_given:
        raise ValueError(f"min_pixels is {least_given}, above max_pixels, {most_given}")
    least, largest = least_given or limits.min_pixels, most_given or limits.max_pixels
    return PixelLimits(min(least, largest), largest)


def with_detail(limits: PixelLimits, detail: Detail) -> PixelLimits:
    if detail != "low":
        return limits
    return PixelLimits(min(limits.min_pixels, LOW_PIXELS), min(limits.max_pixels, LOW_PIXELS))
