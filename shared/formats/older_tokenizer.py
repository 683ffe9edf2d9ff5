"""Makes a model folder with ``tokenizer.json`` of one with another tokenizer: the file, mostly by
transformers, and links to all others."""

import re
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.formats import tekken, tiktoken
from shared.formats.made_folder import made_folder
from shared.model_folder import CONFIG_FILE, TOKENIZER_FILE

VERSION = 1  # of the file's content
RANKS, TEKKEN = "tiktoken.model", "tekken.json"
# Other files, such as weights, are links alone: their changes need no other tokenizer.
INPUTS = re.compile(r"config\.json|.*token|tekken|sentencepiece|spiece|vocab|merges|chat_template")
# Of sentencepiece, of BPE and of WordPiece.
OLDER = "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "vocab.json", "vocab.txt"


def find(path: Path) -> tuple[str, Path] | None:
    """The name of the model in the folder ``path``, and a folder with its tokenizer; None if there
    is no older one, or a newer one. Raises ConfigError."""
    if not (path / CONFIG_FILE).is_file() or (path / TOKENIZER_FILE).exists():
        return None
    if not any((path / name).is_file() for name in (RANKS, TEKKEN, *OLDER)):
        return None
    name = path.resolve().name
    files = (each for each in sorted(path.iterdir()) if each.exists())
    links = {each.name: each for each in files if not each.name.startswith(".")}
    place = f"tokenizers/{name}"
    return name, made_folder(path, place, VERSION, links, lambda: _content(path), INPUTS)


def _content(path: Path) -> dict[str, bytes]:
    """Raises ConfigError."""
    if (path / RANKS).is_file():
        return {TOKENIZER_FILE: msgspec.json.encode(tiktoken.tokenizer_of(path / RANKS))}
    if (path / TEKKEN).is_file():
        files = tekken.files_of(path / TEKKEN)
        return {name: msgspec.json.encode(each) for name, each in files.items()}
    from transformers import AutoTokenizer  # slow, and seldom needed

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
    except Exception as error:  # of any kind, from the files' readers
        reason = " ".join(str(error).split())
        raise ConfigError(f"model: {path} holds no tokenizer that loads: {reason}") from None
    if not tokenizer.get_vocab_size():  # made by transformers of nothing
        raise ConfigError(f"model: {path} holds no tokenizer")
    return {TOKENIZER_FILE: tokenizer.to_str().encode()}
