"""Known formats of reasoning, by the names of vLLM's, SGLang's and FastDeploy's parsers."""

from collections.abc import Container

from shared.dialects.formats import AddressedLayout, BlocksLayout, HarmonyLayout, ReasoningFormat

HY_V3 = ReasoningFormat("hy_v3")
HY_V3_OPEN_SOURCE = ReasoningFormat(
    "hy_v3_opensource",
    "<think:opensource>",
    "</think:opensource>",
    forced_close="\n</think:opensource>\n\n",
)
_FORMATS = (
    HY_V3,
    HY_V3_OPEN_SOURCE,
    ReasoningFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        begins="prompt",
        forced_close="<|close|>think<|sep|>",
        answer_open="<|open|>response<|sep|>",
        ends=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    ReasoningFormat(
        "gemma4",
        "<|channel>",
        "<channel|>",
        label="thought\n",
        forced_close="<channel|>",
    ),
    ReasoningFormat(
        "minimax_m3",
        "<mm:think>",
        "</mm:think>",
        aliases=("minimax-m3",),
        forced_close="\n</mm:think>\n\n",
    ),
    ReasoningFormat(
        "deepseek_r1",
        begins="always",
        aliases=("deepseek-r1", "ernie-45-vl", "ernie-45-vl-thinking", "nano_v3"),
    ),
    ReasoningFormat(
        "deepseek_v3",
        begins="prompt",
        aliases=("deepseek-v3", "deepseek_v31", "deepseek_v4", "deepseek-v4"),
    ),
    ReasoningFormat("qwen3", aliases=("nemotron_v3", "nemotron_3", "qwen3-thinking")),
    ReasoningFormat("glm45", aliases=("glm47", "ling3", "poolside_v1")),
    ReasoningFormat(
        "ernie45",
        aliases=("ernie-x1", "ernie_x1"),
        begins="always",
        forced_close="\n</think>\n\n<response>\n",
        answer_open="<response>",
        answer_close="</response>",
    ),
    ReasoningFormat(
        "cohere_command3",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        forced_close="<|END_THINKING|><|START_RESPONSE|>",
        answer_open="<|START_RESPONSE|>",
        answer_close="<|END_RESPONSE|>",
    ),
    ReasoningFormat("mimo"),
    ReasoningFormat("kimi_k2"),
    ReasoningFormat("step3", begins="always", aliases=("step3p5",)),
    ReasoningFormat("minimax_m2", begins="always"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", forced_close="[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", forced_close="\n</seed:think>\n"),
    ReasoningFormat(
        "granite",
        "Here is my thought process:",
        "Here is my response:",
        forced_close="\n\nHere is my response:",
    ),
    ReasoningFormat(
        "openai_gptoss",
        "",
        "",
        aliases=("gpt-oss", "GptOss"),
        forced_close="",
        channels=HarmonyLayout(),
    ),
    ReasoningFormat("muse_glimmer", "", "", forced_close="", channels=AddressedLayout()),
    ReasoningFormat(
        "inkling",
        "<|content_thinking|>",
        "<|end_message|>",
        forced_close="<|end_message|>",
        channels=BlocksLayout(),
    ),
)

REASONING_FORMATS = {name: each for each in _FORMATS for name in (each.name, *each.aliases)}


def find_reasoning_format(name: str, added_tokens: Container[str]) -> ReasoningFormat | None:
    """The format of a parser's name for a vocabulary; None for an unknown name.

    The markers of Hy3's models have a suffix in some.
    """
    found = REASONING_FORMATS.get(name)
    has_suffix = found is HY_V3 and HY_V3_OPEN_SOURCE.open in added_tokens
    return HY_V3_OPEN_SOURCE if has_suffix else found
