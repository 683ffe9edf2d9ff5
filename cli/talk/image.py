"""Image files as parts of a chat."""

from base64 import b64encode
from pathlib import Path
from typing import Any

from cli.flags import argument_type

BEGINNINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@argument_type
def image_part(path: str) -> dict[str, Any]:
    """Raises ValueError for a file that is no image, or cannot be read."""
    try:
        file = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    kinds = (kind for beginning, kind in BEGINNINGS.items() if file.startswith(beginning))
    if (kind := next(kinds, None)) is None:
        raise ValueError(f"{path}: no PNG, JPEG, GIF or WebP")
    url = f"data:image/{kind};base64,{b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
