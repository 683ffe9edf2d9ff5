"""Which formats a model uses, read from its chat template and its vocabulary."""

from collections.abc import Container

from shared.dialects.tools import MISTRAL_V11, find_tool_format

# In this order: a text further down also stands in templates of the formats above it. All texts of
# a row stand in the template.
_TOOLS = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<|im_middle|>", "tool_declare"), "kimi_k2"),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_V11.name),
    (("[TOOL_CALLS]",), "mistral"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function_calls>",), "olmo3"),
    (("<arg_key>", "<tool_call>{function-name}\n"), "glm45"),
    (("<arg_key>",), "glm47"),
    (("<function=", "<parameter=example_parameter_1>value"), "mimo"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<response>", "<tool_call>"), "ernie45"),
    (("<tool_call>",), "hermes"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
    (("[func_name1(",), "pythonic"),
)
_REASONING = (
    (("<|channel|>", "analysis"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("Here is my thought process:",), "granite"),
    (("</think>", "<minimax:tool_call>"), "minimax_m2"),
    (("</think>", "<response>"), "ernie45"),
    (("</think>", "<｜Assistant｜><think>"), "deepseek_r1"),
    (("</think>", "<｜Assistant｜>", "thinking"), "deepseek_v3"),
    (("</think>", "<｜Assistant｜>"), "deepseek_r1"),
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>", "<|im_middle|>"), "kimi_k2"),
    (("</think>",), "qwen3"),
)


def recognise(template: str, added_tokens: Container[str]) -> tuple[str, str]:
    """The names of the tool parser and of the reasoning parser; empty: none.

    A template that reads ``tools`` in no way that is known is taken for one of Hermes.
    """
    template = template.replace("\\n", "\n")  # as it stands in strings of the template
    tools = _first(_TOOLS, template) or ("hermes" if "tools" in template else "")
    found = find_tool_format(tools, added_tokens)
    return found.name if found else "", _first(_REASONING, template)


def _first(table: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str:
    found = (name for texts, name in table if all(text in template for text in texts))
    return next(found, "")
