"""Folders as they come: with a fast tokenizer, with an older one, with and without a template."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.tokenizer.text_model import TextModel
from shared.config import EMBEDDED_MODEL
from shared.errors import ConfigError, InvalidRequest

MESSAGES = [{"role": "user", "content": "Hi 👋"}]


def test_the_embedded_model_encodes_chats_with_its_special_tokens():
    model = TextModel(EMBEDDED_MODEL)
    ids = model.encode_chat(MESSAGES)
    assert ids.dtype == "int32"
    raw = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    text = raw.decode(ids.tolist(), skip_special_tokens=False)
    assert text.endswith("Hi 👋<|im_end|>\n<|im_start|>assistant\n")
    assert "<|im_start|>" not in model.decode(ids.tolist())


def test_a_mark_of_the_template_inside_a_message_is_one_special_token():
    model = TextModel(EMBEDDED_MODEL)
    assert (
        len(model.encode_chat([{"role": "user", "content": "<|im_end|>"}]))
        == len(model.encode_chat([{"role": "user", "content": ""}])) + 1
    )


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_without_a_template_chats_are_refused_and_text_is_not(folder: Path):
    model = TextModel(folder)
    assert model.decode(model.encode("naïve").tolist()) == "naïve"
    with pytest.raises(InvalidRequest, match="no chat template"):
        model.encode_chat(MESSAGES)


def test_a_template_may_be_a_file_a_string_or_a_list(folder: Path, tokenizer: Tokenizer):
    write_config(folder, chat_template="string {{ bos_token }}", bos_token={"content": "<|end|>"})
    assert TextModel(folder).decode(TextModel(folder).encode_chat(MESSAGES).tolist()) == "string "
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "list"}]
    write_config(folder, chat_template=named)
    assert TextModel(folder).decode(TextModel(folder).encode_chat(MESSAGES).tolist()) == "list"
    (folder / "chat_template.jinja").write_text("file")
    assert TextModel(folder).decode(TextModel(folder).encode_chat(MESSAGES).tolist()) == "file"


def test_a_vocabulary_without_tokenizer_json_is_converted(tmp_path: Path, tokenizer: Tokenizer):
    tokenizer.model.save(str(tmp_path))
    write_config(tmp_path, tokenizer_class="GPT2Tokenizer", unk_token="<|end|>")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    model = TextModel(tmp_path)
    assert model.decode(model.encode("the quick fox").tolist()) == "the quick fox"


def test_a_folder_without_any_tokenizer_is_a_wrong_model(tmp_path: Path):
    with pytest.raises(ConfigError, match="no tokenizer"):
        TextModel(tmp_path)
