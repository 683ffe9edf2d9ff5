"""Images and videos in the ids of a prompt. Pure."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from services.tokenizer.media.pixel_memory import Hold
from services.tokenizer.media_reader import PromptMedia
from shared.errors import InvalidRequest
from shared.media.family import WITH_ARTICLE, Marked, Size
from shared.wire.codec import Array
from shared.wire.messages import ChatOptions, Item, MediumKind


class ReadItem(NamedTuple):
    """``num_tokens`` ids of a medium from ``start`` on stand for its ``pixels`` [n] uint8."""

    start: int
    num_tokens: int
    size: Size
    digest: bytes
    pixels: Array
    time: int = 0


class ReadMedium(NamedTuple):
    """Its ``ids`` in a prompt in place of a placeholder, and the ``items`` among them. Its file has
    ``num_source_pixels``."""

    kind: MediumKind
    ids: Array
    items: tuple[ReadItem, ...]
    num_source_pixels: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_items(self) -> int:
        return len(self.items)

    @property
    def num_bytes(self) -> int:
        return sum(item.pixels.nbytes for item in self.items)


class Placeholder(NamedTuple):
    """The id of a feature, and its text. Both kinds may have the same."""

    id: int
    text: str
    kind: MediumKind


class NoImages(PromptMedia):
    """A prompt without images, for a model that takes some."""

    def __init__(self, placeholders: Sequence[Placeholder]) -> None:
        self._placeholders = placeholders

    def find_items(self, ids: Array, numbers: Sequence[int]) -> list[Item]:
        for each in self._placeholders:
            if (ids == each.id).any():
                raise InvalidRequest(
                    f"the prompt holds the placeholder {each.text} of {WITH_ARTICLE[each.kind]},"
                    f" and no {each.kind}",
                    param="prompt",
                )
        return []


class ReadMedia(PromptMedia):
    """The media of a prompt. A chat template writes the id of the placeholder of its kind once for
    each, or the marker of a family that is ``marked``."""

    def __init__(
        self,
        media: Sequence[ReadMedium],
        placeholders: Sequence[Placeholder],
        max_model_len: int,
        hold: Hold | None = None,
        marked: Marked | None = None,
    ) -> None:
        self.num = len(media)
        self._max_model_len = max_model_len
        self._hold = hold
        self._marked = marked
        self._names = [(each.text, each.kind) for each in placeholders]
        if marked is not None:
            self._names += [(mark.marker, kind) for kind, mark in marked.marks.items()]
        self._media = media
        self._noun = "media" if any(each.kind == "video" for each in media) else "images"
        self._placeholders = placeholders

    def __exit__(self, *error: object) -> None:
        if self._hold is not None:
            self._hold.end()

    def check_texts(self, messages: Sequence[dict[str, Any]], options: ChatOptions) -> None:
        for index, message in enumerate(messages):
            self._check_text(message, f"messages[{index}]")
        for name in ("tools", "documents", "template_kwargs"):
            self._check_text(_parsed(getattr(options, name)), name)

    def _check_text(self, value: Any, param: str) -> None:
        for text in _texts(value):
            for name, kind in self._names:
                if name in text:
                    raise InvalidRequest(
                        f"{param} holds the text {name}, which stands for {WITH_ARTICLE[kind]} of"
                        " this prompt",
                        param=param,
                    )

    def num_tokens(self, number: int) -> int:
        return self._media[number].num_tokens

    def written(self, text: str, numbers: Sequence[int]) -> str:
        if (marked := self._marked) is None:
            return text
        media = [self._media[number] for number in numbers]
        kinds = {mark.marker: kind for kind, mark in marked.marks.items()}
        first, *others = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
        found, wanted = [kinds[marker] for marker in others[::2]], [each.kind for each in media]
        for marker, kind in kinds.items():
            if (num := found.count(kind)) != wanted.count(kind):
                raise InvalidRequest(
                    f"the chat template writes {marker} {num} times for {wanted.count(kind)}"
                    f" {kind}s",
                    param="messages",
                )
        if found != wanted:
            raise _other_order()
        pieces = [first]
        for medium, other in zip(media, others[1::2], strict=True):
            has_parts = medium.kind == "image" and medium.num_items > 1
            before = marked.before_crops if has_parts else ""
            pieces += [before, marked.marks[medium.kind].written, other]
        return "".join(pieces)

    def expand(self, ids: Array, numbers: Sequence[int]) -> Array:
        for each in self._placeholders:
            kinds = self._kinds_of(each.id)
            num = sum(self._media[number].kind in kinds for number in numbers)
            if (found := int((ids == each.id).sum())) != num:
                raise InvalidRequest(
                    f"the chat template writes {found} placeholders ({each.text}) for {num}"
                    f" {'s and '.join(kinds)}s",
                    param="messages",
                )
        places = self._places(ids)
        first, *others = np.split(ids, places)
        pieces = [first]
        for number, piece in zip(numbers, others, strict=True):
            if self._media[number].kind not in self._kinds_of(piece[0]):
                raise _other_order()
            pieces += [self._media[number].ids, piece[1:]]
        return np.concatenate(pieces, dtype=ids.dtype)

    def find_items(self, ids: Array, numbers: Sequence[int]) -> list[Item]:
        places = self._places(ids)
        items: list[Item] = []
        done = 0
        for number in numbers:
            medium = self._media[number]
            within = self._places(medium.ids)
            start = int(places[done]) if done < len(places) else len(ids)
            start = max(0, start - int(within[0]))
            if not np.array_equal(ids[start : start + medium.num_tokens], medium.ids):
                raise self._other_ids(len(places), numbers)
            items += (
                Item(
                    kind=medium.kind,
                    start=start + each.start,
                    num_tokens=each.num_tokens,
                    size=each.size,
                    digest=each.digest,
                    time=each.time,
                )
                for each in medium.items
            )
            done += len(within)
        if done != len(places):
            raise self._other_ids(len(places), numbers)
        return items

    def check_room(self, items: Sequence[Item], num_ids: int, max_tokens: int | None) -> None:
        most = self._max_model_len
        if not items or num_ids + (1 if max_tokens is None else max_tokens) <= most:
            return
        num = sum(item.num_tokens for item in items)
        output = f", max_tokens is {max_tokens}" if num_ids < most else ""
        raise InvalidRequest(
            f"the context holds {most} tokens (max-model-len): the prompt has {num_ids}, {num} of"
            f" them of {self._noun}{output}",
            param="max_tokens" if output else "prompt",
            code="context_length_exceeded",
        )

    def pixels_of(self, items: Sequence[Item]) -> list[Array]:
        known = {item.digest: item.pixels for medium in self._media for item in medium.items}
        return [known[digest] for digest in dict.fromkeys(item.digest for item in items)]

    def _kinds_of(self, placeholder: int) -> list[MediumKind]:
        return [each.kind for each in self._placeholders if each.id == placeholder]

    def _places(self, ids: Array) -> Array:
        return np.flatnonzero(np.isin(ids, [each.id for each in self._placeholders]))

    def _other_ids(self, num_found: int, numbers: Sequence[int]) -> InvalidRequest:
        expected = [self.num_tokens(number) for number in numbers]
        shown = ", ".join(str(each.id) for each in self._placeholders)
        return InvalidRequest(
            f"the ids hold {num_found} placeholders ({shown}); expected"
            f" {len(numbers)} {self._noun} of {expected[:32]} ids, as the model writes them",
            param="prompt",
        )


def _other_order() -> InvalidRequest:
    text = "the chat template writes images and videos in another order"
    return InvalidRequest(text, param="messages")


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, and in the arguments of calls, which are JSON again."""
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
