"""The ids of a chat equal transformers' ``apply_chat_template`` for the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.tokenizer.text_model import TextModel
from shared.model_folder import EMBEDDED_MODEL
from tests.services.tokenizer.chat.samples import CONVERSATION, TOOLS, options
from tests.services.tokenizer.chat.test_prompt import as_templates_read_them

pytestmark = pytest.mark.seconds
CHATS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {"add_generation_prompt": True}),
    ({"tools": TOOLS}, {"tools": TOOLS, "add_generation_prompt": True}),
    ({"adds_generation_prompt": False}, {}),
    (
        {"adds_generation_prompt": False, "continues_final_message": True},
        {"continue_final_message": True},
    ),
)


def check(folder: Path, vocab_size: int, subtests: pytest.Subtests) -> None:
    from transformers import PreTrainedTokenizerFast

    model = TextModel(folder, 4096, vocab_size)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    for ours, theirs in CHATS:
        with subtests.test(**ours):
            ids = model.encode_chat(CONVERSATION, options(**ours))
            expected = reference.apply_chat_template(
                as_templates_read_them(CONVERSATION), return_dict=False, **theirs
            )
            assert ids.tolist() == expected


def test_of_the_embedded_model(subtests: pytest.Subtests):
    check(EMBEDDED_MODEL, 8192, subtests)


def test_of_a_folder_with_templates_and_tokens_of_several_ages(
    tmp_path: Path, tokenizer: Tokenizer, subtests: pytest.Subtests
):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{{ unk_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<|end|>", "__type": "AddedToken"},
        "unk_token": "<|end|>",
        "chat_template": [
            {"name": "default", "template": template},
            {"name": "tool_use", "template": "{{ eos_token }}{{ tools | tojson }}" + template},
        ],
    }
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    check(tmp_path, 400, subtests)
    (tmp_path / "chat_template.jinja").write_text("file" + template)
    check(tmp_path, 400, subtests)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools" + template)
    check(tmp_path, 400, subtests)
