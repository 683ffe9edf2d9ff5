"""Kimi's tokenizer: the ids of tiktoken, and refusals."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError
from shared.formats.tiktoken import NUM_SPECIAL, PATTERN
from shared.model_folder import EMBEDDED_MODEL, TOKENIZER_FILE
from shared.model_location import locate_model

TEXTS = [
    "Hello  shoal, name the four services!\n\n\tx = 12345 + café's",
    "鱼群moves 🐟🐟 and 東京タワー I'LL",
    " leading and trailing ",
    "e\u0301\u0302 ÀÉÎ mixedCASE snake_case 0x1F\r\n\r\n",
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def ranks() -> dict[bytes, int]:
    """The embedded model's tokens."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / TOKENIZER_FILE))
    added = set(tokenizer.get_added_tokens_decoder())
    vocab = sorted((id, text) for text, id in tokenizer.get_vocab().items() if id not in added)
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokens = [bytes(letters[letter] for letter in text) for _, text in vocab]
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.fixture
def folder(tmp_path: Path, ranks: dict[bytes, int]) -> Path:
    """As published: two named tokens, the others are reserved."""
    folder = tmp_path / "kimi"
    folder.mkdir()
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text('{"model_type": "kimi_k2"}')
    first = len(ranks)
    named = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|im_user|>"}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "eos_token": "[EOS]",
        "chat_template": "<|im_user|>{{ messages[0].content }}",
        "added_tokens_decoder": {
            id: {"content": text, "special": text != "<|im_user|>"} for id, text in named.items()
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_ids_match_tiktoken(folder: Path, ranks: dict[bytes, int]) -> None:
    num = len(ranks)
    oracle = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    text = TextModel(locate_model(str(folder)).folder, 4096, num + NUM_SPECIAL)
    for each in TEXTS:
        ids = text.encode(each).tolist()
        assert ids == oracle.encode(each), each
        assert text.decode(ids) == each
    assert text.end_ids == [num + 1]
    marks = f"<|im_user|>[BOS]<|reserved_token_{num + NUM_SPECIAL - 1}|>"
    assert text.encode(marks).tolist() == [num + 2, num, num + NUM_SPECIAL - 1]
    chat = text.encode_chat([{"role": "user", "content": "12"}]).tolist()
    assert chat == [num + 2, *oracle.encode("12")]


def test_each_token_is_its_own_id(folder: Path, ranks: dict[bytes, int]) -> None:
    text = TextModel(locate_model(str(folder)).folder, 4096, len(ranks) + NUM_SPECIAL)
    oracle = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for token in list(ranks)[256::7]:
        try:
            word = token.decode()
        except UnicodeDecodeError:
            continue
        assert text.encode(word).tolist() == oracle.encode(word), word


@pytest.mark.parametrize(
    ("content", "changes", "problem"),
    [
        (b"IQ== 1\n", {}, r"line 1 is b'IQ== 1'; expected are base64 and the rank 0"),
        (b"!! 0\n", {}, "line 1 is b'!! 0'"),
        (b"IQ== 0\n", {}, "255 of 256 bytes are no tokens"),
        (b"IQ== 0\nIQ== 1\n", {}, "line 2 has the token of an earlier one"),
        (
            b"IQ== 0\n",
            {"tokenizer_class": "QWenTokenizer"},
            "tokenizer_class 'QWenTokenizer' is not known; .* it is TikTokenTokenizer, of Kimi",
        ),
    ],
)
def test_other_files_are_refused(
    folder: Path, content: bytes, changes: dict[str, Any], problem: str
) -> None:
    (folder / "tiktoken.model").write_bytes(content)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=problem):
        locate_model(str(folder))
