"""Images that are several items of a prompt, with texts between."""

from collections.abc import Callable
from itertools import zip_longest
from math import prod

import numpy as np

from services.tokenizer.media.fitting import (
    NO_PIXELS,
    Fitting,
    check_sides,
    item_of,
    width_and_height,
)
from services.tokenizer.media.placeholders import ReadItem, ReadMedium
from services.tokenizer.media.reader_messages import Answer, Targets
from services.tokenizer.media.readers import Pixels
from shared.media.family import PixelLimits
from shared.media.lfm2_vl import BILINEAR, Parts, TilesAndView
from shared.wire.codec import Array


class PartFitting(Fitting):
    """Tiles, and a view of the whole."""

    kind = "image"

    def __init__(
        self, family: TilesAndView, limits: PixelLimits, encode: Callable[[str], Array]
    ) -> None:
        self._family = family
        self._limits = limits
        self._encode = encode

    def fit(self, found: Answer) -> Targets:
        width, height = found.width, found.height
        upright, turned = self._parts = [
            self._family.parts(*each, self._limits) for each in ((width, height), (height, width))
        ]
        check_sides(upright.view)
        media = [self._medium(each, None, "") for each in self._parts]
        self.num_items = max(each.num_items for each in media)
        self.num_tokens = max(each.num_tokens for each in media)
        self.num_bytes = max(3 * sum(map(prod, each.sizes)) for each in self._parts)
        views = [width_and_height(each.view) for each in (upright, turned)]
        if not upright.rows:
            return Targets(views[0], views[1], resample=BILINEAR)
        whole, turned_whole = (
            (each.columns * each.tile, each.rows * each.tile) for each in (upright, turned)
        )
        tile = upright.tile, upright.tile
        return Targets(whole, turned_whole, tile=tile, views=views, resample=BILINEAR)

    def medium(self, pixels: Pixels | None, salt: str) -> ReadMedium:
        return self._medium(self._parts[pixels is not None and pixels.is_turned], pixels, salt)

    def _medium(self, parts: Parts, pixels: Pixels | None, salt: str) -> ReadMedium:
        pieces, items = list[Array](), list[ReadItem]()
        place = end = 0
        for text, size in zip_longest(parts.texts, parts.sizes):
            pieces.append(self._encode(text))
            end += len(pieces[-1])
            if size is None:
                break
            num_bytes = 3 * prod(size)
            data = NO_PIXELS if pixels is None else pixels.data[place : place + num_bytes]
            features = self._family.ids(size)
            items.append(item_of(self.kind, end, len(features), size, data, salt))
            pieces.append(features)
            place, end = place + num_bytes, end + len(features)
        return ReadMedium(self.kind, np.concatenate(pieces), tuple(items))
