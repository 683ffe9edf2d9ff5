"""The parts of a chat that stand for media: ``{"type": "image", "media": number}``. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from services.tokenizer.chat.normalize import MEDIA, Message
from shared.errors import InvalidRequest


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
