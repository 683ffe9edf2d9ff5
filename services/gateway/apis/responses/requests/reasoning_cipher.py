"""Reasoning that a client keeps for us and cannot change: ``encrypted_content``."""

import os
from base64 import urlsafe_b64decode, urlsafe_b64encode

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES, NONCE_BYTES = 32, 12
PREFIX = "shoal1."


class ReasoningCipher:
    """Encrypts for one API key, its ``owner``: other keys cannot read the content. Without a
    ``secret`` only this process can read it."""

    def __init__(self, secret: str | None) -> None:
        key = os.urandom(KEY_BYTES)
        if secret is not None:
            derivation = HKDF(SHA256(), KEY_BYTES, salt=None, info=b"shoal reasoning")
            key = derivation.derive(secret.encode())
        self._cipher = ChaCha20Poly1305(key)

    def encrypt(self, text: str, owner: str) -> str:
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, text.encode(), owner.encode())
        return PREFIX + urlsafe_b64encode(nonce + sealed).decode()

    def decrypt(self, content: str, owner: str) -> str | None:
        """None: it was encrypted by another server or for another owner."""
        try:
            data = urlsafe_b64decode(content.removeprefix(PREFIX))
            nonce, sealed = data[:NONCE_BYTES], data[NONCE_BYTES:]
            return self._cipher.decrypt(nonce, sealed, owner.encode()).decode()
        except (InvalidTag, ValueError):
            return None
