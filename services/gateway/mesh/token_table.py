"""The text of the model's tokens, plain and in JSON."""

from collections.abc import Callable

import msgspec
import numpy as np

from shared.wire.codec import Array

_encode = msgspec.json.Encoder().encode


class _Cache(dict[int, bytes]):
    """A piece of JSON for each id, made when it is first asked for."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        self._make = make

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._make(token_id)
        return piece


class Spelling:
    """One way to name tokens. ``names`` are JSON strings, unique for each token; ``keys`` the same
    with a colon; ``entries`` begin the object that describes a token in a chat, up to the value of
    its logprob."""

    def __init__(
        self, table: "TokenTable", name: Callable[[int], str], unique_name: Callable[[int], str]
    ) -> None:
        self.table = table
        self.names = _Cache(lambda token_id: _encode(unique_name(token_id)))
        self.keys = _Cache(lambda token_id: self.names[token_id] + b":")
        self.entries = _Cache(
            lambda token_id: (
                b'{"token":%b,"bytes":%b,"logprob":'
                % (_encode(name(token_id)), _encode(list(table.written(token_id))))
            )
        )


class TokenTable:
    """``data`` [n] uint8 are the bytes of all tokens in order of ids, concatenated; ``lengths``
    [vocab_size] int32 are the numbers of bytes of the tokens. A vocabulary is large, so all else is
    made lazily."""

    def __init__(self, data: Array, lengths: Array) -> None:
        self._data = data.tobytes()
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._are_tokens: dict[str, bool] = {}
        self._by_text = Spelling(self, self.text, self.text_or_bytes)
        self._by_id = Spelling(self, _id_name, _id_name)
        self.json_texts = _Cache(lambda token_id: _encode(self.text(token_id)))

    def spelling(self, by_id: bool) -> Spelling:
        """Tokens named by their text, or as ``token_id:5``."""
        return self._by_id if by_id else self._by_text

    def written(self, token_id: int) -> bytes:
        """The bytes may be a part of a character."""
        start = int(self._ends[token_id - 1]) if token_id else 0
        return self._data[start : int(self._ends[token_id])]

    def __contains__(self, text: object) -> bool:
        """Whether a token has this text."""
        if not isinstance(text, str):
            return False
        if text not in self._are_tokens:
            self._are_tokens[text] = self._is_token(text.encode())
        return self._are_tokens[text]

    def text(self, token_id: int) -> str:
        return self.written(token_id).decode(errors="replace")

    def text_or_bytes(self, token_id: int) -> str:
        """A part of a character as OpenAI writes it: ``bytes:\\xe2\\x80``."""
        written = self.written(token_id)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def _is_token(self, written: bytes) -> bool:
        at = self._data.find(written)
        while at >= 0:
            token_id = int(np.searchsorted(self._ends, at, side="right"))
            if self.written(token_id) == written:
                return True
            at = self._data.find(written, at + 1)
        return False


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"
