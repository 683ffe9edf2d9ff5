"""The signature of a thinking block, which identifies it when it comes back.

A signature is no secret and proves nothing about the author of the text: a client that may send a
block may as well send any text. It is a digest of the text and of the model, to recognize a block
that was changed, or written by another model or server. If the client wants no text in the block,
the signature holds it, encoded, so that the model has it again in the next turn.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256

PREFIX = "shoal"
NUM_DIGEST_BYTES = 18


class Signer:
    """Signs one text that comes in pieces; ``holds_text``: the signature contains the text."""

    def __init__(self, fingerprint: str, holds_text: bool = False) -> None:
        self._digest = sha256(f"{fingerprint}\n".encode())
        self._pieces: list[bytes] | None = [] if holds_text else None

    def add(self, text: str) -> None:
        data = text.encode()
        self._digest.update(data)
        if self._pieces is not None:
            self._pieces.append(data)

    def signature(self) -> str:
        digest = _encoded(self._digest.digest()[:NUM_DIGEST_BYTES])
        text = "" if self._pieces is None else _encoded(b"".join(self._pieces))
        return f"{PREFIX}.{digest}.{text}"


def signed_text(fingerprint: str, thinking: str, signature: str) -> str | None:
    """The text of a returned block; None: the signature is not this model's for the text."""
    parts = signature.split(".")
    if len(parts) != 3 or parts[0] != PREFIX:
        return None
    try:
        text = thinking or urlsafe_b64decode(parts[2].encode()).decode()
    except ValueError:
        return None
    signer = Signer(fingerprint)
    signer.add(text)
    return text if signer.signature().split(".")[1] == parts[1] else None


def _encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).decode()
