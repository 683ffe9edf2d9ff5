"""Folders of all kinds: with a fast tokenizer, with an older one, with and without a template."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, ByteLevel, Decoder, Fuse, Metaspace, Sequence

from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError, InvalidRequest
from shared.model_folder import EMBEDDED_MODEL

MAX_LEN = 100
VOCAB = 8192
MESSAGES = [{"role": "user", "content": "Hi 👋"}]


def test_the_embedded_model_encodes_chats_with_its_special_tokens():
    model = TextModel(EMBEDDED_MODEL, MAX_LEN, VOCAB)
    ids = model.encode_chat(MESSAGES)
    assert ids.dtype == "int32"
    raw = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    text = raw.decode(ids.tolist(), skip_special_tokens=False)
    assert text.endswith("Hi 👋<|im_end|>\n<|im_start|>assistant\n")
    assert "<|im_start|>" not in model.decode(ids.tolist())


def test_a_mark_of_the_template_inside_a_message_is_one_special_token():
    model = TextModel(EMBEDDED_MODEL, MAX_LEN, VOCAB)
    assert (
        len(model.encode_chat([{"role": "user", "content": "<|im_end|>"}]))
        == len(model.encode_chat([{"role": "user", "content": ""}])) + 1
    )


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff"])
def test_a_broken_tokenizer_is_a_wrong_setting(tmp_path: Path, content: bytes):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^model: {tmp_path}/tokenizer.json: "):
        TextModel(tmp_path, MAX_LEN, VOCAB)


def write_config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_without_a_template_chats_are_refused_and_text_is_not(folder: Path):
    model = TextModel(folder, MAX_LEN, VOCAB)
    assert model.decode(model.encode("naïve").tolist()) == "naïve"
    with pytest.raises(InvalidRequest, match="no chat template"):
        model.encode_chat(MESSAGES)


def test_a_template_may_be_a_file_a_string_or_a_list(folder: Path, tokenizer: Tokenizer):
    write_config(folder, chat_template="string {{ bos_token }}", bos_token={"content": "<|end|>"})
    assert (
        TextModel(folder, MAX_LEN, VOCAB).decode(
            TextModel(folder, MAX_LEN, VOCAB).encode_chat(MESSAGES).tolist()
        )
        == "string "
    )
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "list"}]
    write_config(folder, chat_template=named)
    assert (
        TextModel(folder, MAX_LEN, VOCAB).decode(
            TextModel(folder, MAX_LEN, VOCAB).encode_chat(MESSAGES).tolist()
        )
        == "list"
    )
    (folder / "chat_template.jinja").write_text("file")
    assert (
        TextModel(folder, MAX_LEN, VOCAB).decode(
            TextModel(folder, MAX_LEN, VOCAB).encode_chat(MESSAGES).tolist()
        )
        == "file"
    )


def test_a_folder_without_any_tokenizer_is_a_wrong_model(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no file tokenizer\.json"):
        TextModel(tmp_path, MAX_LEN, VOCAB)


def test_a_text_that_must_be_too_long_is_refused_before_it_is_encoded(folder: Path):
    with pytest.raises(InvalidRequest, match=r"100 tokens .* 1000000 characters"):
        TextModel(folder, MAX_LEN, VOCAB).encode("x" * 1_000_000)


def test_truncation_and_padding_stored_in_the_folder_are_not_applied(
    tmp_path: Path, tokenizer: Tokenizer
):
    stored = Tokenizer.from_str(tokenizer.to_str())
    stored.enable_truncation(3)
    stored.enable_padding(length=90)
    stored.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox"
    assert TextModel(tmp_path, MAX_LEN, VOCAB).encode(text).tolist() == tokenizer.encode(text).ids


def test_bad_words_have_ids_at_the_start_of_a_text_and_after_a_space():
    model = TextModel(EMBEDDED_MODEL, MAX_LEN, VOCAB)
    variants = [model.decode(ids) for ids in model.encode_words(["shoal", " fish", "shoal"])]
    assert variants == ["shoal", " shoal", " fish"]


@pytest.mark.parametrize("bad", [8192, -1])
def test_ids_outside_the_vocabulary_are_refused(bad: int):
    with pytest.raises(InvalidRequest, match="8192"):
        TextModel(EMBEDDED_MODEL, MAX_LEN, VOCAB).check_ids(np.array([1, bad], np.int32))


@pytest.mark.parametrize("decoder", [ByteLevel(), Sequence([ByteFallback(), Fuse()]), Metaspace()])
def test_no_decoder_puts_spaces_between_added_tokens(decoder: Decoder):
    """So spaces_between_special_tokens changes nothing."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    tokenizer.decoder = decoder
    begin, end = (tokenizer.token_to_id(each) for each in ("<|im_start|>", "<|im_end|>"))
    for ids in ([begin, end], [end, begin, begin]):
        written = [tokenizer.id_to_token(each) for each in ids]
        assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(written)
