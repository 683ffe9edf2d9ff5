"""Open markers are read from the prompt's end, and formats from templates or settings."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.tokenizer.text_model import ChatSettings, TextModel
from shared.errors import ConfigError
from shared.wire.messages import ChatOptions, OutputStart
from tests.services.tokenizer.chat.samples import CONVERSATION, options
from tests.services.tokenizer.conftest import SAMPLE, byte_level_tokenizer

ANSWER, REASONING, UNDECIDED = OutputStart.ANSWER, OutputStart.REASONING, OutputStart.UNDECIDED
SPECIAL, MARKERS = ("<|im_start|>", "<|im_end|>"), ("<think>", "</think>", "<tool_call>")
ASKED = [{"role": "user", "content": "What do <think> and </think> mean? <think>"}]
END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ end }}{% endif %}"
    "{# <think></think> #}"
)


def text_model(
    folder: Path,
    template: str = END,
    added: tuple[str, ...] = (*SPECIAL, *MARKERS),
    special: tuple[str, ...] = SPECIAL,
    **settings: Any,
) -> TextModel:
    tokenizer: Tokenizer = byte_level_tokenizer([SAMPLE], 300)
    tokenizer.add_special_tokens([each for each in added if each in special])
    tokenizer.add_tokens([each for each in added if each not in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return TextModel(folder, 4096, tokenizer.get_vocab_size(), ChatSettings(**settings))


def start(model: TextModel, end: str = "", **chosen: object) -> OutputStart:
    chat = options(template_kwargs={"end": end}, **chosen)
    return model.output_start(model.encode_chat(ASKED, chat), chat)


@pytest.mark.parametrize(
    "added", [(*SPECIAL, *MARKERS), SPECIAL, (*SPECIAL, "<think>"), (*SPECIAL, "</think>")]
)
def test_the_end_of_the_prompt_says_how_the_output_begins(
    tmp_path: Path, added: tuple[str, ...], subtests: pytest.Subtests
):
    """For markers as tokens or plain text; markers in a user's text do not count."""
    models = {
        parser: text_model(tmp_path, added=added, reasoning_parser=parser)
        for parser in ("qwen3", "deepseek_r1", "deepseek_v3", "none")
    }
    for parser, end, expected in (
        ("qwen3", "", UNDECIDED),
        ("qwen3", "<think>\n", REASONING),
        ("qwen3", "<think>\n\n</think>\n\n", ANSWER),
        ("qwen3", "<think>\none</think>\n<think>" + "two " * 100, REASONING),
        ("deepseek_r1", "", REASONING),
        ("deepseek_r1", "</think>", ANSWER),
        ("deepseek_v3", "", ANSWER),
        ("deepseek_v3", "<think>", REASONING),
        ("none", "<think>", ANSWER),
    ):
        with subtests.test(parser=parser, end=end[:20]):
            assert start(models[parser], end) == expected


def test_markers_of_several_tokens_say_how_the_output_begins(tmp_path: Path):
    added = (*SPECIAL, "<|open|>", "<|close|>", "<|sep|>")
    template = END.replace("<think></think>", "<|open|><|close|><|sep|>")
    for special in (added, SPECIAL):
        model = text_model(tmp_path, template, added, special=special)
        assert model.reasoning is not None
        assert model.reasoning.name == "kimi_k3"
        assert start(model, "<|open|>think<|sep|>") == REASONING
        assert start(model, "<|open|>response<|sep|>") == ANSWER


def test_the_answer_that_is_continued_is_no_reasoning(tmp_path: Path, subtests: pytest.Subtests):
    model = text_model(tmp_path, reasoning_parser="deepseek_r1")
    chat = ChatOptions(adds_generation_prompt=False, continues_final_message=True)
    for content, expected in (
        ("The answer", ANSWER),
        ("<think>Let me", REASONING),
        ("<think>Yes.</think>It", ANSWER),
    ):
        with subtests.test(content=content):
            messages = [*ASKED, {"role": "assistant", "content": content}]
            assert model.output_start(model.encode_chat(messages, chat), chat) == expected


def test_a_plain_text_is_an_answer_unless_it_is_written_as_a_chat(
    tmp_path: Path, subtests: pytest.Subtests
):
    model = text_model(tmp_path)
    for text, expected in (
        ("Once upon a time", ANSWER),
        ("Once <think>", REASONING),
        ("<|im_start|>assistant\n", UNDECIDED),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ANSWER),
    ):
        with subtests.test(text=text):
            assert model.output_start(model.encode(text), None) == expected


def test_formats_are_set_or_recognised(tmp_path: Path, subtests: pytest.Subtests):
    tools = "{% for tool in tools %}<tool_call>{% endfor %}"
    settings: Any
    for template, settings, expected in (
        ("hi", {}, (None, None)),
        (END + tools, {}, ("hermes", "qwen3")),
        (END + tools, {"tool_parser": "none", "reasoning_parser": "none"}, (None, None)),
        ("hi", {"tool_parser": "qwen25", "reasoning_parser": "glm45"}, ("hermes", "glm45")),
    ):
        with subtests.test(template=template, **settings):
            model = text_model(tmp_path, template, **settings)
            names = tuple(each and each.name for each in (model.tools, model.reasoning))
            assert names == expected


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_a_parser_that_nobody_knows_is_a_wrong_setting(tmp_path: Path, setting: str):
    settings: dict[str, Any] = {setting: "hermess"}
    with pytest.raises(ConfigError, match=r"-parser: hermess is neither auto nor none nor one of"):
        text_model(tmp_path, **settings)


def test_added_tokens_have_the_text_that_is_shown(tmp_path: Path):
    model = text_model(tmp_path, added=(*SPECIAL, "<think>", "  ", "▁▁", "\n"))
    think, start_ = model.added_ids["<think>"], model.added_ids["<|im_start|>"]
    end = model.added_ids["<|end|>"]
    assert model.added_texts(False)[start_] == "<|im_start|>"
    hidden = model.added_texts(True)
    assert (hidden[think], hidden[start_], hidden[end]) == ("<think>", "", "")
    assert len(hidden) == 4


def test_the_conversation_of_an_agent_begins_anew_after_a_tools_result(tmp_path: Path):
    model = text_model(tmp_path)
    chat = ChatOptions()
    ids = model.encode_chat(CONVERSATION[1:4], chat)
    assert model.output_start(ids, chat) == UNDECIDED
