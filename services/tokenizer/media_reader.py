"""Hook for the images of prompts, and the parts of a chat that stand for them:
``{"type": "image", "media": number}``."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from services.tokenizer.chat.normalize import MEDIA, Message
from services.tokenizer.text_model import TextModel
from shared.errors import InvalidRequest
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.codec import Array
from shared.wire.messages import ChatOptions, Convert, Item, MediumKind, Submit


class PromptMedia:
    """The images of one prompt; here there are none. ``num`` counts them, and numbers name them.
    Its context ends when the prompt is sent or has failed."""

    num = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def check_texts(self, messages: Sequence[dict[str, Any]], options: ChatOptions) -> None:
        """Raises InvalidRequest for a text that the model would read as an image."""

    def num_tokens(self, number: int) -> int:
        return 0

    def written(self, text: str, numbers: Sequence[int]) -> str:
        """``text`` as a chat template wrote it, with the texts around the images ``numbers``."""
        return text

    def expand(self, ids: Array, numbers: Sequence[int]) -> Array:
        """``ids`` [n] int32 as a chat template wrote them, with all tokens of the images
        ``numbers``. Raises InvalidRequest."""
        return ids

    def find_items(self, ids: Array, numbers: Sequence[int]) -> list[Item]:
        """The images ``numbers`` in ``ids`` [n] int32. Raises InvalidRequest unless ``ids`` hold
        these and no others."""
        return []

    def check_room(self, items: Sequence[Item], num_ids: int, max_tokens: int | None) -> None:
        """Raises InvalidRequest if a prompt of ``num_ids`` has no room beside ``items``. Schedulers
        check others."""

    def pixels_of(self, items: Sequence[Item]) -> list[Array]:
        """The pixels of each different digest in ``items``, in their order."""
        return []


NO_MEDIA = PromptMedia()


class MediaReader:
    """Reads no files, and refuses prompts with images. ``kinds``: of the model."""

    kinds: tuple[MediumKind, ...] = ()
    more_kinds: tuple[MediumKind, ...] = ()

    async def read(
        self, message: Submit | Convert, files: Sequence[Array], salt: str, owner: str
    ) -> PromptMedia:
        """Reads the ``files`` [n] uint8 of ``message.media``, of a Convert the sizes alone. API
        keys (``owner``) share processes; only prompts with the same ``salt`` share pixels.

        Raises InvalidRequest for a file that is no image or too large, and Unavailable while none
        can be read. A cancelled caller stops waiting.
        """
        if message.media:
            raise InvalidRequest(
                "the model takes no images", param=message.media[0].param or "messages"
            )
        return NO_MEDIA

    async def close(self) -> None:
        return


MakeMedia = Callable[[TextModel, Path, TokenizerConfig], MediaReader]


def media_of(messages: Sequence[Message]) -> list[int]:
    """The numbers of the media in ``messages``, which were checked, in their order."""
    return [part["media"] for _, part in _parts(messages)]


def check_media(messages: Sequence[Message], num_media: int) -> None:
    """Raises InvalidRequest unless each of the media has one part."""
    seen: set[int] = set()
    for param, part in _parts(messages):
        number = part.get("media")
        if type(number) is not int or not 0 <= number < num_media:
            raise InvalidRequest(
                f"{param} is an image without a file; the request has {num_media}", param=param
            )
        if number in seen:
            raise InvalidRequest(f"{param} is the file of another part", param=param)
        seen.add(number)
    if len(seen) < num_media:
        raise InvalidRequest(
            f"messages have parts for {len(seen)} of {num_media} images", param="messages"
        )


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, dict[str, Any]]]:
    """With their places."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in MEDIA:
                yield f"messages[{index}].content[{number}]", part
