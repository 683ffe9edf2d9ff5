"""Mistral's tokenizer: the ids of tiktoken and of transformers' conversion, and refusals."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from transformers.integrations.mistral.tokenizer import MistralConverter

from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError
from shared.formats.gguf.tokenizer import TEKKEN
from shared.model_location import locate_model
from tests.shared.formats.test_tiktoken import TEXTS, _own_cache, ranks

__all__ = ["_own_cache", "ranks"]

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
NUM_SPECIAL = 10


def tekken_of(ranks: dict[bytes, int]) -> dict[str, Any]:
    """With two entries that are too many, as published."""
    tokens = [*ranks, b"more", b"and more"]
    return {
        "config": {
            "pattern": TEKKEN,
            "default_vocab_size": NUM_SPECIAL + len(ranks),
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(SPECIAL)
        ],
    }


@pytest.fixture
def folder(tmp_path: Path, ranks: dict[bytes, int]) -> Path:
    folder = tmp_path / "mistral"
    folder.mkdir()
    (folder / "tekken.json").write_text(json.dumps(tekken_of(ranks)))
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    template = "<s>[INST]{{ messages[0].content }}[/INST]"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_ids_match_tiktoken_and_of_transformers(folder: Path, ranks: dict[bytes, int]) -> None:
    oracle = tiktoken.Encoding("tekken", pat_str=TEKKEN, mergeable_ranks=ranks, special_tokens={})
    theirs = MistralConverter(str(folder / "tekken.json")).converted()
    text = TextModel(locate_model(str(folder)).folder, 4096, NUM_SPECIAL + len(ranks))
    for each in TEXTS:
        ids = [NUM_SPECIAL + rank for rank in oracle.encode(each)]
        assert theirs.encode(each, add_special_tokens=False).ids == ids, each
        assert text.encode(each).tolist() == [1, *ids], each
        assert text.decode(ids) == each
    assert text.end_ids == [2]
    marks = "[INST]</s><SPECIAL_9>"
    assert text.encode(marks).tolist() == [1, 3, 2, 9]
    chat = text.encode_chat([{"role": "user", "content": "12"}]).tolist()
    assert chat == [1, 3, *(NUM_SPECIAL + rank for rank in oracle.encode("12")), 4]


def test_a_tokenizer_config_of_the_folder_stays(folder: Path, ranks: dict[bytes, int]) -> None:
    given = {"eos_token": "[/INST]", "chat_template": "[INST]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    text = TextModel(locate_model(str(folder)).folder, 4096, NUM_SPECIAL + len(ranks))
    assert text.end_ids == [4]
    assert text.encode_chat([{"role": "user", "content": "12"}]).tolist() == [3]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"special_tokens": []}, "special_tokens have not the ranks 0, 1, 2 and so on"),
        (
            {"special_tokens": [{"rank": 1, "token_str": "<s>"}]},
            "special_tokens have not the ranks 0, 1, 2",
        ),
        (
            {"config": {"pattern": "a", "default_num_special_tokens": 5}},
            "default_num_special_tokens 5 is below the 6 special_tokens",
        ),
        (
            {"config": {"pattern": "a", "default_num_special_tokens": 1 << 40}},
            f"default_num_special_tokens {1 << 40} is above 100000",
        ),
        ({"vocab": [{"token_bytes": "!"}]}, "vocab: token 1: token_bytes '!' are not base64"),
        ({"vocab": [{"token_bytes": "é"}]}, "vocab: token 1: token_bytes 'é' are not base64"),
        ({"vocab": [{"token_bytes": ""}]}, "vocab: token 1 has 0 bytes; it may have 1 to 1024"),
        ({"vocab": [{"token_bytes": "IQ" * 2000}]}, "vocab: token 1 has 3000 bytes"),
        ({"vocab": [{"token_bytes": "IQ=="}] * 2}, "vocab: token 2 has the token of an earlier"),
        ({"vocab": [{"token_bytes": "IQ=="}]}, "255 of 256 bytes are no tokens"),
        ({"config": {}}, "missing required field `pattern`"),
    ],
)
def test_other_files_are_refused(
    folder: Path, ranks: dict[bytes, int], changes: dict[str, Any], problem: str
) -> None:
    (folder / "tekken.json").write_text(json.dumps(tekken_of(ranks) | changes))
    with pytest.raises(ConfigError, match=problem):
        locate_model(str(folder))
