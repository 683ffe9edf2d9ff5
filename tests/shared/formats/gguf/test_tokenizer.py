"""Tokenizers in GGUF files write the ids and the texts of the tokenizers that they were made of."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from shared.errors import ConfigError
from shared.formats.gguf.folder import folder_of
from shared.formats.gguf.tokenizer import DIGITS, LLAMA3, MAX_PIECE_CHARS, QWEN2, SPLITS
from shared.model_folder import read_eos_ids
from tests.shared.formats.gguf.writer import add_shape_of_nothing

VOCAB_SIZE = 600
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
ODD_TEXTS = [
    "",
    " ",
    "  two  spaces   and three ",
    "Hello, world! It's 12345 o'clock; I'LL be back.",
    "tabs\tand\r\nlines\n\n\n  indented",
    "naïve café — “quotes” … €5 ½",
    "e\u0301 decomposed, ﬁ ligature, ﷺ",
    "日本語のテキスト 한국어 עברית العربية हिन्दी",
    "👩‍👩‍👧‍👦 emoji 🇩🇪 \U0001f9d1🏽‍💻",
    "\u200b\u00a0\u3000zero and wide \ufeff",
    "def f(x):\n    return x ** 2  # comment\n",
    "<s>special</s><|im_end|> <unk> <think>user</think>",
    "a" * 300,
    "\x00\x01\x7f control",
    "CamelCaseWords and snake_case/paths//here\\n",
    "١٢٣ ⅣⅤ 3.14159e-10 1,000,000",
]
SPLIT_NAMES = ["gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken"]


def save(
    path: Path,
    tokens: dict[int, str],
    types: dict[int, TokenType],
    arch: str = "llama",
    **keys: Any,
) -> Path:
    """A file of no layers with these tokens."""
    writer = GGUFWriter(path, arch)
    add_shape_of_nothing(writer, len(tokens))
    writer.add_token_list([tokens[id] for id in range(len(tokens))])
    writer.add_token_types([types.get(id, TokenType.NORMAL) for id in range(len(tokens))])
    for name, value in keys.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder_of(path) / "tokenizer.json"))


def splitter(name: str) -> pre_tokenizers.PreTokenizer:
    split = GGUF_PRE_TOKENIZER_SPLITS.get(name)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    if split is None:
        return whole
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), whole])


def byte_level(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer = splitter(name)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(ODD_TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def pieces(adds_space: bool) -> tuple[Tokenizer, dict[str, float]]:
    """As the converted tokenizers of Llama 2 and of Gemma, and the scores of its tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    prepend = [normalizers.Prepend("▁")] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, replace])
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL, *in_bytes],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*ODD_TEXTS[3:6], *ODD_TEXTS[10:11]] * 3, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        each for each in content["added_tokens"] if each["content"] in SPECIAL
    ]
    vocab, scores = content["model"]["vocab"], scores_of(content["model"])
    content["model"]["merges"] = generate_merges(vocab, scores)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer, scores


def scores_of(model: dict[str, Any]) -> dict[str, float]:
    """The order of the merges, as sentencepiece's trainer writes them."""
    made = ["".join(pair) for pair in model["merges"]]
    ranks = {text: -float(rank) for rank, text in reversed([*enumerate(made)])}
    return {text: ranks.get(text, -1e6) for text in model["vocab"]}


def by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {id: text for text, id in tokenizer.get_vocab().items()}


def types_of(tokenizer: Tokenizer) -> dict[int, TokenType]:
    added = tokenizer.get_added_tokens_decoder()
    types = {
        id: TokenType.CONTROL if each.special else TokenType.USER_DEFINED
        for id, each in added.items()
    }
    in_bytes = {
        id: TokenType.BYTE for id, text in by_id(tokenizer).items() if text.startswith("<0x")
    }
    return types | in_bytes | {0: TokenType.UNKNOWN}


def assert_same(found: Tokenizer, original: Tokenizer) -> None:
    for text in ODD_TEXTS:
        ids = original.encode(text).ids
        assert found.encode(text).ids == ids, text
        for skips in (False, True):
            assert found.decode(ids, skip_special_tokens=skips) == original.decode(
                ids, skip_special_tokens=skips
            )
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, original.get_vocab_size(), 20).tolist()
        assert found.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("name", SPLIT_NAMES)
def test_byte_level_tokenizers(tmp_path: Path, name: str) -> None:
    original = byte_level(name)
    merges = json.loads(original.to_str())["model"]["merges"]
    path = save(
        tmp_path / "model.gguf",
        by_id(original),
        types_of(original),
        tokenizer_model="gpt2",
        tokenizer_pre=name,
        token_merges=[" ".join(pair) for pair in merges],
        add_bos_token=False,
    )
    assert_same(read(path), original)


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece_tokenizers(tmp_path: Path, adds_space: bool) -> None:
    original, scores = pieces(adds_space)
    tokens = by_id(original)
    path = save(
        tmp_path / "model.gguf",
        tokens,
        types_of(original),
        tokenizer_model="llama",
        token_scores=[scores.get(tokens[id], -1e6) for id in range(len(tokens))],
        add_space_prefix=adds_space,
        add_bos_token=False,
    )
    assert_same(read(path), original)


def test_tokenizers_of_gemma(tmp_path: Path) -> None:
    """Its scores are no order of merges; tokens of several spaces are written with spaces."""
    original, _ = pieces(adds_space=False)
    content = json.loads(original.to_str())
    vocab = content["model"]["vocab"]
    content["model"]["merges"] = generate_merges(vocab, {text: -id for text, id in vocab.items()})
    original = Tokenizer.from_str(json.dumps(content))
    spaces = {id: text.replace("▁", " ") for text, id in vocab.items() if not text.strip("▁")}
    spaces = {id: text for id, text in spaces.items() if len(text) > 1}
    assert spaces
    path = save(
        tmp_path / "model.gguf",
        by_id(original) | spaces,
        types_of(original),
        arch="gemma2",
        tokenizer_model="llama",
        token_scores=[-1000.0] * original.get_vocab_size(),
        add_space_prefix=False,
        add_bos_token=False,
    )
    assert_same(read(path), original)


def test_our_splits_match_transformers() -> None:
    ours = {name: split for name, split in SPLITS.items() if split not in (None, DIGITS)}
    for name in ours.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys():
        assert ours[name] == GGUF_PRE_TOKENIZER_SPLITS[name], name
    assert {LLAMA3, QWEN2} <= {*GGUF_PRE_TOKENIZER_SPLITS.values()}


def test_marks_around_a_text_and_ends(tmp_path: Path) -> None:
    original = byte_level("gpt-2")
    merges = json.loads(original.to_str())["model"]["merges"]
    keys: dict[str, Any] = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "token_merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": True,
        "add_eos_token": True,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    path = save(tmp_path / "model.gguf", by_id(original), types_of(original), **keys)
    original.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> <s> $B </s>",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    assert_same(read(path), original)
    folder = folder_of(path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert config["chat_template"] == keys["chat_template"]
    assert read_eos_ids(folder, VOCAB_SIZE) == [2, 3]  # <|im_end|> ends a turn


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"tokenizer_model": "bert"}, "tokenizer.ggml.model bert is not supported"),
        ({"tokenizer_model": "gpt2", "tokenizer_pre": "new"}, "tokenizer.ggml.pre new is not"),
        ({"tokenizer_model": "gpt2"}, "metadata tokenizer.ggml.merges is missing"),
        ({"tokenizer_model": "gpt2", "token_merges": ["a c"]}, "number 0, 'a c', is no pair"),
        ({"tokenizer_model": "llama", "token_scores": [1.0]}, "scores has 1 elements, not 3"),
        ({"tokenizer_model": "llama", "eos_token_id": 9}, "eos_token_id 9 is no id of 3 tokens"),
        ({}, "metadata tokenizer.ggml.model is missing"),
    ],
)
def test_bad_tokenizers(tmp_path: Path, keys: dict[str, Any], text: str) -> None:
    path = save(tmp_path / "model.gguf", dict(enumerate("abc")), {}, **keys)
    with pytest.raises(ConfigError, match=text):
        folder_of(path)


def test_a_token_that_is_too_long(tmp_path: Path) -> None:
    tokens = {0: "a", 1: "b" * (MAX_PIECE_CHARS + 1)}
    path = save(tmp_path / "model.gguf", tokens, {}, tokenizer_model="llama")
    with pytest.raises(ConfigError, match=r"tokens: number 1, 'b{20}'…, has 1025 characters"):
        folder_of(path)


def test_a_token_of_the_most_characters(tmp_path: Path) -> None:
    """Its merges are made of its splits into two tokens."""
    half = MAX_PIECE_CHARS // 2
    tokens = {0: "b" * half, 1: "b" * MAX_PIECE_CHARS, 2: "b" * (half - 1)}
    path = save(tmp_path / "model.gguf", tokens, {}, tokenizer_model="llama")
    content = json.loads((folder_of(path) / "tokenizer.json").read_text())
    assert content["model"]["merges"] == [[tokens[0], tokens[0]]]
