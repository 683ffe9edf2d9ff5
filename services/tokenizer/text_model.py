"""The textual half of a model folder: vocabulary, special tokens and chat template."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from services.tokenizer.template import ChatTemplate
from services.tokenizer.vocabulary import token_bytes
from shared.codec import Array
from shared.errors import ConfigError, InvalidRequest
from shared.messages import PromptKind

MAX_CHAR_BYTES = 4  # in UTF-8


class TextModel:
    """Text ⇄ ids. Its methods may be called from several threads.

    A text that must have more than ``max_model_len`` tokens is refused before it is encoded, which
    for megabytes takes seconds. Ids are those below ``vocab_size``.
    """

    def __init__(self, folder: Path, max_model_len: int, vocab_size: int) -> None:
        config = _read_json(folder / "tokenizer_config.json")
        self._tokenizer = _load_tokenizer(folder)
        self._tokenizer.no_truncation()  # some folders store it, and it would cut in silence
        self._tokenizer.no_padding()
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._max_token_chars = max(map(len, self._tokenizer.get_vocab()))
        self._template = _load_template(folder, config)

    def encode(self, text: str, adds_special_tokens: bool = True) -> np.ndarray:
        """Ids of a plain prompt, with the special tokens the model's tokenizer adds: [n] int32."""
        return self._encode(text, adds_special_tokens)

    def encode_chat(
        self, messages: list[dict[str, Any]], adds_special_tokens: bool = False
    ) -> np.ndarray:
        """Ids of a conversation; templates mostly write the special tokens: [n] int32."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; use /v1/completions", param="messages"
            )
        return self._encode(self._template.render(messages), adds_special_tokens)

    def encode_words(self, words: list[str]) -> list[list[int]]:
        """The ids of each word, at the start of a text and after a space, where they differ."""
        variants = [variant for word in words for variant in (word, f" {word.lstrip()}")]
        encodings = self._tokenizer.encode_batch(variants, add_special_tokens=False)
        distinct = dict.fromkeys(tuple(encoding.ids) for encoding in encodings if encoding.ids)
        # A tokenizer may know more ids than the model can write.
        return [list(ids) for ids in distinct if max(ids) < self.vocab_size]

    def check_size(self, kind: PromptKind, prompt: Array) -> None:
        """Raises InvalidRequest for a prompt that is too long whatever is in it. A chat is never
        refused here: its template may leave out most of it."""
        if kind == "text":
            self._check_num_chars(prompt.nbytes // MAX_CHAR_BYTES)
        elif kind == "ids" and len(prompt) > self.max_model_len:
            raise self._too_long(f"has {len(prompt)}")

    def check_ids(self, ids: np.ndarray) -> None:
        """Raises InvalidRequest for an id that the model does not have."""
        if len(ids) and (ids.max() >= self.vocab_size or ids.min() < 0):
            raise InvalidRequest(
                f"the prompt holds token ids from {ids.min()} to {ids.max()}; the model has"
                f" {self.vocab_size}",
                param="prompt",
            )

    def token_bytes(self) -> list[bytes]:
        """How each id is written, alone."""
        return token_bytes(self._tokenizer, self.vocab_size)

    def to_json(self) -> str:
        """As in tokenizer.json."""
        return str(self._tokenizer.to_str())

    def _encode(self, text: str, adds_special_tokens: bool) -> np.ndarray:
        self._check_num_chars(len(text))
        # Batches are encoded and decoded without the GIL, single texts are not.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=adds_special_tokens)
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Sequence[int], skips_special_tokens: bool = True) -> str:
        """Decodes a few ids; it holds the GIL meanwhile."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skips_special_tokens))

    def decode_many(self, ids: Sequence[int]) -> str:
        """With special tokens."""
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=False)
        return str(text)

    def _check_num_chars(self, num: int) -> None:
        if num > self.max_model_len * self._max_token_chars:
            raise self._too_long(f"has {num} characters")

    def _too_long(self, length: str) -> InvalidRequest:
        return InvalidRequest(
            f"the context holds {self.max_model_len} tokens (max-model-len): the prompt {length},"
            " that leaves no room for output",
            param="prompt",
            code="context_length_exceeded",
        )


def _load_tokenizer(folder: Path) -> Tokenizer:
    """The fast tokenizer of the folder; transformers converts an older format, which takes
    seconds."""
    # Else batches go to threads that all of them share, and a long text holds up a short one.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    path = folder / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {folder} holds no tokenizer that loads: {error}") from None
    tokenizer: Tokenizer = loaded.backend_tokenizer
    if not tokenizer.get_vocab_size():  # what transformers makes of nothing
        raise ConfigError(f"model: {folder} holds no tokenizer")
    return tokenizer


def _load_template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = path.read_text() if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = next((each["template"] for each in source if each["name"] == "default"), None)
    if source is None:
        return None
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like by name; older folders write each as an object with its
    content."""
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if content is not None:
            tokens[name] = str(content)
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"model: {path} is no JSON: {error}") from None
    return dict(content)
