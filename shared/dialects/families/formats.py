"""The formats of families, and their recognition from a model's chat template and vocabulary."""

import re
from collections.abc import Container

from shared.dialects.families.reasoning import REASONING_FORMATS, find_reasoning_format
from shared.dialects.families.tools import (
    HERMES,
    HY_V3,
    LFM2,
    MISTRAL_V11,
    TOOL_FORMATS,
    find_tool_format,
)
from shared.dialects.formats import Formats, ReasoningFormat, ToolFormat

# In order: texts of a later row also occur in templates of earlier ones. A template must contain
# all texts of a row. A row without a name is an unsupported format.
_TOOLS = (
    (("<atem:function_calls>", "<|message|>"), "muse_glimmer"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<|content_invoke_tool_json|>",), "inkling"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("<|tool_call>call:",), "gemma4"),
    (("<tool_sep",), HY_V3.name),
    (("<function=", "<|python_tag|>"), ""),
    (("<tool_calls>[",), ""),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|channel|>", "<|message|>"), "openai"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<|im_middle|>", "tool_declare"), "kimi_k2"),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_V11.name),
    (("[TOOL_CALLS]",), "mistral"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<dots_function_call>",), "dots"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<function_calls>",), "olmo3"),
    (("<arg_key>", "<tool_call>{function-name}\n"), "glm45"),
    (("<arg_key>", "</arg_key>\n"), "glm45"),
    (("<arg_key>",), "glm47"),
    (("<function=", "<parameter=example_parameter_1>value"), "mimo"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<response>", "<tool_call>"), "ernie45"),
    (("<tool_call>",), "hermes"),
    (("functools[",), "phi4_mini_json"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_call|>",), "granite"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
    (("[func_name1(",), "pythonic"),
)
_REASONING = (
    (("<atem:function_calls>", "<|message|>"), "muse_glimmer"),
    (("<|content_thinking|>",), "inkling"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<tool_sep",), "hy_v3"),
    (("<mm:think>",), "minimax_m3"),
    (("<|channel>thought",), "gemma4"),
    (("<|channel|>", "analysis"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("Here is my thought process:",), "granite"),
    (("</think>", "<minimax:tool_call>"), "minimax_m2"),
    (("<|START_THINKING|>", "<|START_RESPONSE|>"), "cohere_command3"),
    (("</think>", "<response>", "<tool_call>"), "ernie45"),
    (("</think>", "<｜Assistant｜><think>"), "deepseek_r1"),
    (("</think>", "<｜Assistant｜>", "thinking"), "deepseek_v3"),
    (("</think>", "<｜Assistant｜>"), "deepseek_r1"),
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>", "<|im_middle|>"), "kimi_k2"),
    (("</think>",), "qwen3"),
)

# Past calls, or a marker of calls in a format other than Hermes.
_OWN_FORM = re.compile(
    r"tool_calls|function_call|\[/?[A-Z_]*TOOL[A-Z_]*\]"
    r"|<(?!/?tools>|/?tool_response>)[^<>\s]*(?i:tool|function|action|invoke)[^<>\s]*[>\s]"
)


class FormatsOfFamilies(Formats):
    tools = TOOL_FORMATS
    reasoning = REASONING_FORMATS

    def find_tools(self, name: str, added_tokens: Container[str]) -> ToolFormat | None:
        return find_tool_format(name, added_tokens)

    def find_reasoning(self, name: str, added_tokens: Container[str]) -> ReasoningFormat | None:
        return find_reasoning_format(name, added_tokens)

    def recognise(self, template: str, added_tokens: Container[str]) -> tuple[str, str]:
        """A template that writes ``tools`` without a form of calls counts as Hermes, unless the
        vocabulary has another form's marker."""
        template = template.replace("\\n", "\n")  # strings in the template contain it escaped
        tools = _first(_TOOLS, template)
        if tools is None and "tools" in template and not _OWN_FORM.search(template):
            tools = LFM2.name if LFM2.section_open in added_tokens else HERMES.name
        found = find_tool_format(tools or "", added_tokens)
        reasoning = find_reasoning_format(_first(_REASONING, template) or "", added_tokens)
        return found.name if found else "", reasoning.name if reasoning else ""


def _first(table: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str | None:
    found = (name for texts, name in table if all(text in template for text in texts))
    return next(found, None)
