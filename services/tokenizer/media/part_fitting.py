"""Images that are several items of a prompt, with texts between."""

from collections.abc import Callable
from math import prod

from services.tokenizer.media.fitting import (
    NO_IDS,
    NO_PIXELS,
    Fitting,
    ImageFitting,
    check_sides,
    interleaved,
    item_of,
    width_and_height,
)
from services.tokenizer.media.placeholders import ReadItem, ReadMedium
from services.tokenizer.media.reader_messages import Answer, Targets
from services.tokenizer.media.readers import Pixels
from shared.media.family import Family, Marked, PixelLimits
from shared.media.lfm2_vl import BILINEAR, Parts, TilesAndView
from shared.wire.codec import Array


class CropFitting(ImageFitting):
    """The parts of a wide or high image follow it, with texts between them."""

    def __init__(
        self, family: Family, marked: Marked, limits: PixelLimits, encode: Callable[[str], Array]
    ) -> None:
        super().__init__(family, limits)
        self._marked = marked
        self._encode = encode

    def fit(self, found: Answer) -> Targets:
        targets = super().fit(found)
        self.num_items = num = 1 + len(targets.boxes)
        self.num_bytes *= num
        between = [self._marked.behind_first, *[self._marked.between] * (num - 2)][: num - 1]
        texts = [NO_IDS, *map(self._encode, between)]
        self._ids, self._starts = interleaved(texts, [self._family.ids(self._size)] * num)
        self.num_tokens = len(self._ids)
        return targets

    def medium(self, pixels: Pixels | None, salt: str) -> ReadMedium:
        num, size = self._family.num_tokens(self._size), self._size
        parts = [NO_PIXELS] * self.num_items
        if pixels is not None:
            parts = [*pixels.data.reshape(self.num_items, -1)]
        items = (
            item_of(self.kind, start, num, size, data, salt)
            for start, data in zip(self._starts, parts, strict=True)
        )
        return ReadMedium(self.kind, self._ids, tuple(items))


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
        features = [self._family.ids(size) for size in parts.sizes]
        ids, starts = interleaved([*map(self._encode, parts.texts)], features)
        items, place = list[ReadItem](), 0
        for start, own, size in zip(starts, features, parts.sizes, strict=True):
            end = place + 3 * prod(size)
            data = NO_PIXELS if pixels is None else pixels.data[place:end]
            items.append(item_of(self.kind, start, len(own), size, data, salt))
            place = end
        return ReadMedium(self.kind, ids, tuple(items))
