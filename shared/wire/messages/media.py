"""Images and videos in prompts: files go down to the tokenizer, and pixels from there to workers.

A buffer of a message is one file, or the pixels of one item. Peers below ``MINORS`` of a kind get
none of them. Workers give items to workers of the role ``encoder``, which no scheduler knows.
"""

from typing import Annotated, Literal

from msgspec import Meta

from shared.wire.messages.ranges import MEDIA_MINOR, VIDEO_MINOR, Int32, Int64, Name, Row

MAX_MEDIA = 1024  # of a prompt
MAX_SIDE = 1 << 16

MediumKind = Literal["image", "video"]
MINORS: dict[MediumKind, int] = {"image": MEDIA_MINOR, "video": VIDEO_MINOR}
Detail = Literal["auto", "low", "high", "original"]
ItemDigest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Side = Annotated[int, Meta(ge=1, le=MAX_SIDE)]


class Medium(Row, frozen=True, kw_only=True):
    """A file of a prompt as the client sent it; ``param`` is its place in the request. ``detail``
    is OpenAI's."""

    kind: MediumKind = "image"
    param: Name = ""
    detail: Detail = "auto"


class Item(Row, frozen=True, kw_only=True):
    """An image as the model reads it, or some frames of a video: ``num_tokens`` ids from ``start``
    on stand for it.

    Its pixels are ``size`` (frames, height, width) times three bytes. The ``digest`` covers the
    kind, the size, the pixels, the time and the request's salt: equal digests are equal features.
    Frames are ``time`` positions behind the first ones of their video.
    """

    kind: MediumKind = "image"
    start: Int32
    num_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    size: tuple[Side, Side, Side]
    digest: ItemDigest
    time: Int32 = 0

    def follows(self, other: "Item") -> bool:
        """In one video, at the next id."""
        return self.kind == other.kind == "video" and self.start == other.end

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_bytes(self) -> int:
        """Of its pixels."""
        frames, height, width = self.size
        return frames * height * width * 3


class Encoded(Row, tag=37, frozen=True):
    """Worker → scheduler: an admitted sequence may be computed up to its first image that is not
    encoded, which is at ``num_ids``; all of it, if that is the length of its prompt."""

    request: Name
    attempt: Int32
    num_ids: Int32


class Encode(Row, tag=45, frozen=True):
    """Worker → encoder: compute the features of ``item``, and answer with Features. Buffers: u1,
    its pixels."""

    item: Item


class Features(Row, tag=46, frozen=True):
    """Encoder → worker: the features of the item with the ``digest``, and their CRC-32. Buffers:
    u1, their bytes, row by row."""

    digest: ItemDigest
    checksum: Int64


Media = Annotated[list[Medium], Meta(max_length=MAX_MEDIA)]
Items = Annotated[list[Item], Meta(max_length=MAX_MEDIA)]
