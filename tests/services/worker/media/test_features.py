"""Which features are kept."""

import torch

from services.worker.media.features import FeatureCache
from shared.wire.messages import Item


def item(letter: str, width: int = 2) -> Item:
    return Item(start=0, num_tokens=width, size=(1, 1, width), digest=16 * letter.encode())


class Cache(FeatureCache):
    """Of one byte for each token."""

    def use(self, name: str, width: int = 2) -> None:
        found = item(name, width)
        if self.find(found) is None:
            self.add(found, torch.full((width, 1), ord(name), dtype=torch.uint8))

    def kept(self, names: str, width: int = 2) -> str:
        return "".join(name for name in names if item(name, width) in self)


def test_features_used_last_are_kept() -> None:
    cache = Cache(4)
    for name in "abac":
        cache.use(name)
    assert cache.kept("abc") == "ac"
    cache.use("d", width=9)
    assert cache.kept("abc") == "", "there is room for one alone"
    assert cache.kept("d", width=9) == "d"
    assert cache.kept("d") == "", "another size is another image"
    cache.use("e")
    assert cache.kept("d", width=9) + cache.kept("e") == "e"


def test_pinned_features_stay_whatever_comes() -> None:
    cache = Cache(4)
    for name in "aab":
        cache.pin(item(name))
    for name in "axyb":
        cache.use(name)
    assert not cache.is_overfull
    cache.pin(item("c"))
    cache.use("c")
    assert cache.kept("abcxy") == "abc"
    assert cache.is_overfull
    cache.unpin(item("a"))
    assert cache.kept("abc") == "abc", "it is needed once more"
    cache.unpin(item("a"))
    assert cache.kept("abc") == "bc"
    assert not cache.is_overfull
