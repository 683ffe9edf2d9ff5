"""Images with parts, which are items of their own."""

from collections.abc import Callable

import numpy as np

from services.tokenizer.media.fitting import NO_PIXELS, ImageFitting, item_of
from services.tokenizer.media.placeholders import ReadMedium
from services.tokenizer.media.reader_messages import Answer, Targets
from services.tokenizer.media.readers import Pixels
from shared.media.family import Family, Marked, PixelLimits
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
        num_crops = len(targets.boxes)
        self.num_items = 1 + num_crops
        self.num_bytes *= self.num_items
        marked, ids = self._marked, self._family.ids(self._size)
        texts = [marked.behind_first, *[marked.between] * (num_crops - 1)][:num_crops]
        pieces = [ids, *(part for text in texts for part in (self._encode(text), ids))]
        ends = np.cumsum([len(each) for each in pieces]).tolist()
        self._starts = [end - len(ids) for end in ends[::2]]
        self._ids: Array = np.concatenate(pieces)
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
