"""Templates and special tokens are found in folders of any age."""

import json
from pathlib import Path

import pytest

from services.tokenizer.chat.template_files import read_special_tokens, read_templates
from shared.errors import ConfigError

NAMED = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "list tools"}]


def test_files_come_before_the_configuration_and_a_setting_before_all(tmp_path: Path):
    config = {"chat_template": NAMED}
    assert read_templates(tmp_path, {}, None) == {}
    assert read_templates(tmp_path, {"chat_template": "text"}, None) == {"default": "text"}
    assert read_templates(tmp_path, config, None) == {"default": "list", "tool_use": "list tools"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file tools")
    assert read_templates(tmp_path, config, None) == {"default": "list", "tool_use": "file tools"}
    (tmp_path / "chat_template.jinja").write_text("file ü", encoding="utf-8")
    found = read_templates(tmp_path, config, None)
    assert found == {"default": "file ü", "tool_use": "file tools"}
    (tmp_path / "set").write_text("set")
    assert read_templates(tmp_path, config, tmp_path / "set") == {"default": "set"}


def test_templates_that_cannot_be_read_are_a_wrong_configuration(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"chat-template: .*missing"):
        read_templates(tmp_path, {}, tmp_path / "missing")
    for value in ([{"name": "default"}], ["text"], {"default": 1}):
        with pytest.raises(ConfigError, match="chat_template"):
            read_templates(tmp_path, {"chat_template": value}, None)


def test_special_tokens_are_all_that_the_folder_names(tmp_path: Path):
    older = {"bos_token": "older", "sep_token": {"content": "[SEP]"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "extra_special_tokens": {"image_token": "<image>"},
    }
    assert read_special_tokens(tmp_path, config) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "[SEP]",
        "image_token": "<image>",
    }
