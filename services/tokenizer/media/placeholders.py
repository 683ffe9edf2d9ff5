"""Images in the ids of a prompt. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from services.tokenizer.media.pixel_memory import Hold
from services.tokenizer.media_reader import PromptMedia
from shared.errors import InvalidRequest
from shared.media.family import Size
from shared.wire.codec import Array
from shared.wire.messages import ChatOptions, Item


class ReadImage(NamedTuple):
    """Its ``ids`` in a prompt, of which a placeholder is the first one, and ``pixels`` [n] uint8 of
    a file that has ``num_source_pixels``."""

    size: Size
    ids: Array
    digest: bytes
    pixels: Array
    num_source_pixels: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class NoImages(PromptMedia):
    """A prompt without images, for a model that takes some."""

    def __init__(self, placeholder: int, text: str) -> None:
        self._placeholder = placeholder
        self._text = text

    def find_items(self, ids: Array, numbers: Sequence[int]) -> list[Item]:
        if (ids == self._placeholder).any():
            raise InvalidRequest(
                f"the prompt holds the placeholder {self._text} of an image, and no image",
                param="prompt",
            )
        return []


class ReadImages(PromptMedia):
    """The images of a prompt. A chat template writes the id ``placeholder``, whose text is
    ``text``, once for each."""

    def __init__(
        self, images: Sequence[ReadImage], placeholder: int, text: str, hold: Hold | None = None
    ) -> None:
        self.num = len(images)
        self._hold = hold
        self._images = images
        self._placeholder = placeholder
        self._text = text

    def __exit__(self, *error: object) -> None:
        if self._hold is not None:
            self._hold.end()

    def check_texts(self, messages: Sequence[dict[str, Any]], options: ChatOptions) -> None:
        for index, message in enumerate(messages):
            self._check_text(message, f"messages[{index}]")
        for name in ("tools", "documents", "template_kwargs"):
            self._check_text(_parsed(getattr(options, name)), name)

    def _check_text(self, value: Any, param: str) -> None:
        if any(self._text in text for text in _texts(value)):
            raise InvalidRequest(
                f"{param} holds the text {self._text}, which stands for an image of this prompt",
                param=param,
            )

    def num_tokens(self, number: int) -> int:
        return self._images[number].num_tokens

    def expand(self, ids: Array, numbers: Sequence[int]) -> Array:
        places = self._places(ids)
        if len(places) != len(numbers):
            raise InvalidRequest(
                f"the chat template writes {len(places)} placeholders ({self._text}) for"
                f" {len(numbers)} images",
                param="messages",
            )
        first, *others = np.split(ids, places)
        pieces = [first]
        for number, piece in zip(numbers, others, strict=True):
            pieces += [self._images[number].ids, piece[1:]]
        return np.concatenate(pieces, dtype=ids.dtype)

    def find_items(self, ids: Array, numbers: Sequence[int]) -> list[Item]:
        places = self._places(ids)
        items: list[Item] = []
        done = 0
        for number in numbers:
            image = self._images[number]
            start = int(places[done]) if done < len(places) else len(ids)
            num = image.num_tokens
            if not np.array_equal(ids[start : start + num], image.ids):
                raise self._other_ids(len(places), numbers)
            items.append(Item(start=start, num_tokens=num, size=image.size, digest=image.digest))
            done += len(self._places(image.ids))
        if done != len(places):
            raise self._other_ids(len(places), numbers)
        return items

    def pixels_of(self, items: Sequence[Item]) -> list[Array]:
        known = {image.digest: image.pixels for image in self._images}
        return [known[digest] for digest in dict.fromkeys(item.digest for item in items)]

    def _places(self, ids: Array) -> Array:
        return np.flatnonzero(ids == self._placeholder)

    def _other_ids(self, num_found: int, numbers: Sequence[int]) -> InvalidRequest:
        expected = [self.num_tokens(number) for number in numbers]
        return InvalidRequest(
            f"the ids hold {num_found} placeholders ({self._placeholder}); expected"
            f" {len(numbers)} images of {expected[:32]} ids, as the model writes them",
            param="prompt",
        )


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, and those in the arguments of calls, which are JSON again."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left += [*each, *each.values()]
            if isinstance(arguments := each.get("arguments"), str):
                left.append(_parsed(arguments))
        elif isinstance(each, list):
            left += each


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text else None
    except (msgspec.MsgspecError, RecursionError):
        return None
