"""The features of images by content, so that an image is encoded once for several sequences and
turns of a chat."""

from collections import Counter

from torch import Tensor

from shared.wire.messages import Item

Content = tuple[bytes, tuple[int, int, int]]  # digest and size


class FeatureCache:
    """Keeps pinned features, and others used last as far as all have at most ``max_bytes``, or one
    is left. Items are pinned before they are encoded, and as often as they are needed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: dict[Content, Tensor] = {}  # last used ones last
        self._pins: Counter[Content] = Counter()

    def __contains__(self, item: Item) -> bool:
        return content_of(item) in self._kept

    @property
    def is_overfull(self) -> bool:
        """True if the pinned ones alone have more than ``max_bytes``."""
        pinned = (self._kept[each].nbytes for each in self._pins if each in self._kept)
        return sum(pinned) > self._max_bytes

    def find(self, item: Item) -> Tensor | None:
        """[num_tokens, size]"""
        content = content_of(item)
        features = self._kept.pop(content, None)
        if features is not None:
            self._kept[content] = features
        return features

    def add(self, item: Item, features: Tensor) -> None:
        self._kept[content_of(item)] = features
        self._num_bytes += features.nbytes
        self._evict()

    def pin(self, item: Item) -> None:
        self._pins[content_of(item)] += 1

    def unpin(self, item: Item) -> None:
        content = content_of(item)
        self._pins[content] -= 1
        if not self._pins[content]:
            del self._pins[content]
            self._evict()

    def _evict(self) -> None:
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            content = next((each for each in self._kept if each not in self._pins), None)
            if content is None:
                break
            self._num_bytes -= self._kept.pop(content).nbytes


def content_of(item: Item) -> Content:
    return item.digest, item.size
