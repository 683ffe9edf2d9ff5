"""The text of the quality measurement, as ids of a model."""

from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from shared.errors import ConfigError
from shared.model_folder import TOKENIZER_FILE, find_file


class ScoredPiece(NamedTuple):
    """The first ``num_given`` of the ``ids`` [n] int32 are not scored; the others are ``num_bytes``
    of text."""

    ids: np.ndarray
    num_given: int
    num_bytes: int


def load_tokenizer(folder: Path) -> Tokenizer:
    """Raises ConfigError."""
    path = find_file(folder, TOKENIZER_FILE)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises only this type
        raise ConfigError(f"model: {path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_text(path: Path | None) -> str:
    """By default the text held out of the embedded model's training. Raises ConfigError."""
    if path is None:
        return _held_out()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text: {path} is not UTF-8: {error.reason}") from None


def _held_out() -> str:
    try:
        from models.training.corpus import load_documents, split_documents
    except ImportError:  # a wheel has no models
        text = "--text: a file is needed where Shoal runs without its source tree"
        raise ConfigError(text) from None
    return "\n".join(each.text for each in split_documents(load_documents())[1])


def cut(text: str, tokenizer: Tokenizer, length: int, num: int) -> list[ScoredPiece]:
    """Up to ``num`` pieces of ``length`` ids, spread over the text. Each begins with the
    tokenizer's special tokens. Raises ConfigError if the text is too short."""
    special = _special_ids(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    width = length - len(special)
    num_whole = len(ids) // width
    if num_whole == 0:
        raise ConfigError(f"--text: its {len(ids)} tokens are fewer than --length = {length}")
    numbers = np.linspace(0, num_whole, min(num, num_whole), endpoint=False, dtype=int)
    parts = [special + ids[start : start + width] for start in (numbers * width).tolist()]
    return [_piece(part, len(special), tokenizer) for part in parts]


def _special_ids(tokenizer: Tokenizer) -> list[int]:
    encoding = tokenizer.encode("a")
    marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    return [token_id for token_id, _ in takewhile(lambda each: each[1], marked)]


def _piece(ids: list[int], num_special: int, tokenizer: Tokenizer) -> ScoredPiece:
    num_given = max(1, num_special)  # the first token cannot be predicted
    num_bytes, num_given_bytes = (
        len(tokenizer.decode(part, skip_special_tokens=False).encode())
        for part in (ids, ids[:num_given])
    )
    return ScoredPiece(np.array(ids, np.int32), num_given, num_bytes - num_given_bytes)
