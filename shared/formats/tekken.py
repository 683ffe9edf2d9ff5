"""Makes ``tokenizer.json`` of ``tekken.json``, the tokenizer of Mistral's models: special tokens,
and then the bytes of others in base64, by their ranks."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.formats.ranked import ranked_vocab, tokenizer_of_ranks
from shared.model_folder import TOKENIZER_CONFIG_FILES, TOKENIZER_FILE, decode_json, find_file

ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TEMPLATE = "chat_template.json"
MAX_SPECIAL = 100_000  # special tokens; published files have 1,000


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int | None = None  # with special tokens; later entries are none
    default_num_special_tokens: int | None = None


class _Token(msgspec.Struct):
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str
    is_control: bool = True


class _Tekken(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] = []


class _Template(msgspec.Struct):
    chat_template: str


def files_of(file: Path) -> dict[str, dict[str, Any]]:
    """The content of tokenizer.json and, for a folder without one, of tokenizer_config.json. Raises
    ConfigError."""
    given = decode_json(file, _Tekken)
    files = {TOKENIZER_FILE: _tokenizer_of(file, given)}
    if not (file.parent / TOKENIZER_CONFIG_FILES[0]).exists():
        files[TOKENIZER_CONFIG_FILES[0]] = _tokenizer_config_of(file, given)
    return files


def _tokenizer_of(file: Path, given: _Tekken) -> dict[str, Any]:
    config = given.config
    named = {each.rank: each for each in given.special_tokens}
    if sorted(named) != list(range(len(given.special_tokens))) or not named:
        raise ConfigError(f"model: {file}: special_tokens have not the ranks 0, 1, 2 and so on")
    num_special = config.default_num_special_tokens or len(named)
    if num_special > MAX_SPECIAL:
        raise ConfigError(
            f"model: {file}: default_num_special_tokens {num_special} is above {MAX_SPECIAL}"
        )
    if num_special < len(named):
        raise ConfigError(
            f"model: {file}: default_num_special_tokens {num_special} is below the"
            f" {len(named)} special_tokens"
        )
    vocab_size = config.default_vocab_size or num_special + len(given.vocab)
    tokens = _tokens(file, given.vocab[: max(0, vocab_size - num_special)])
    fillers = (_Special(rank, f"<SPECIAL_{rank}>") for rank in range(len(named), num_special))
    added = [
        {"id": each.rank, "content": each.token_str, "special": each.is_control}
        for each in (*(named[rank] for rank in range(len(named))), *fillers)
    ]
    has_bos = any(each["content"] == ROLES["bos_token"] for each in added)
    vocab = ranked_vocab(file, tokens, "vocab: token")
    bos = ROLES["bos_token"] if has_bos else None
    return tokenizer_of_ranks(vocab, config.pattern, added, num_special, bos)


def _tokenizer_config_of(file: Path, given: _Tekken) -> dict[str, Any]:
    content = {each.token_str for each in given.special_tokens}
    roles = {role: text for role, text in ROLES.items() if text in content}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    if (file.parent / TEMPLATE).is_file():
        template = decode_json(find_file(file.parent, TEMPLATE), _Template)
        config["chat_template"] = template.chat_template
    return config


def _tokens(file: Path, vocab: Sequence[_Token]) -> list[bytes]:
    found = []
    for number, each in enumerate(vocab):
        try:
            found.append(base64.b64decode(each.token_bytes, validate=True))
        except ValueError:
            raise ConfigError(
                f"model: {file}: vocab: token {number + 1}: token_bytes {each.token_bytes!r} are"
                " not base64"
            ) from None
    return found
