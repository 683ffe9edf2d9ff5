"""Known formats of tool calls, by the names of vLLM's, SGLang's and FastDeploy's parsers."""

from collections.abc import Container
from dataclasses import replace

from shared.dialects.formats import (
    AddressedLayout,
    BareLayout,
    BlocksLayout,
    ElementsLayout,
    HarmonyLayout,
    JsonLayout,
    MarkedNameLayout,
    PairsLayout,
    PythonicLayout,
    TaggedLayout,
    ToolFormat,
)

HERMES = ToolFormat(
    "hermes",
    JsonLayout(),
    aliases=("qwen25", "qwen3_json"),
    padding="\n",
    separator="\n",
    call_open="<tool_call>",
    call_close="</tool_call>",
)
MISTRAL = ToolFormat("mistral", JsonLayout(is_list=True), call_open="[TOOL_CALLS]", ids="mistral")
MISTRAL_V11 = ToolFormat(
    "mistral_v11",
    MarkedNameLayout("[ARGS]", id_open="[CALL_ID]"),
    call_open="[TOOL_CALLS]",
    ids="mistral",
)
LFM2 = ToolFormat(
    "lfm2",
    PythonicLayout(),
    section_open="<|tool_call_start|>",
    section_close="<|tool_call_end|>",
)
HY_V3 = ToolFormat(
    "hy_v3",
    PairsLayout(name_close="<tool_sep>"),
    section_open="<tool_calls>",
    section_close="</tool_calls>",
    call_open="<tool_call>",
    call_close="</tool_call>",
    padding="\n",
    separator="\n",
)
HY_V3_OPEN_SOURCE = replace(
    HY_V3,
    name="hy_v3_opensource",
    layout=PairsLayout(
        "<arg_key:opensource>",
        "</arg_key:opensource>",
        "<arg_value:opensource>",
        "</arg_value:opensource>",
        name_close="<tool_sep:opensource>",
    ),
    section_open="<tool_calls:opensource>",
    section_close="</tool_calls:opensource>",
    call_open="<tool_call:opensource>",
    call_close="</tool_call:opensource>",
)
_DSML = TaggedLayout(
    function_open='<｜DSML｜invoke name="',
    parameter_open='<｜DSML｜parameter name="',
    name_close='">',
    parameter_close="</｜DSML｜parameter>",
    function_close="</｜DSML｜invoke>",
    type_open='" string="',
    type_words={
        "string": "true",
        **dict.fromkeys(("number", "integer", "boolean", "null", "array", "object"), "false"),
    },
)
_INVOKE = TaggedLayout(
    function_open='<invoke name="',
    parameter_open='<parameter name="',
    name_close='">',
    function_close="</invoke>",
)
_FORMATS = (
    HERMES,
    MISTRAL,
    MISTRAL_V11,
    LFM2,
    HY_V3,
    HY_V3_OPEN_SOURCE,
    *(
        ToolFormat(
            name,
            _DSML,
            aliases=(name.replace("_", ""),),
            section_open=f"<｜DSML｜{tag}>",
            section_close=f"</｜DSML｜{tag}>",
            padding="\n",
            separator="\n",
            tokens=("｜DSML｜",),
        )
        for name, tag in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    ToolFormat("gemma4", BareLayout(), call_open="<|tool_call>", call_close="<tool_call|>"),
    ToolFormat(
        "kimi_k3",
        TaggedLayout(
            function_open='<|open|>call tool="',
            index_open='" index="',
            name_close='"<|sep|>',
            parameter_open='<|open|>argument key="',
            type_open='" type="',
            type_words={each: each for each in ("string", "number", "boolean", "null", "array")}
            | {"integer": "number", "object": "object"},
            parameter_close="<|close|>argument<|sep|>",
            function_close="<|close|>call<|sep|>",
            line_end="",
            escapes={"&": "&amp;", '"': "&quot;"},
        ),
        section_open="<|open|>tools<|sep|>",
        section_close="<|close|>tools<|sep|>",
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    ToolFormat(
        "cohere_command3",
        JsonLayout("parameters", is_list=True, name_key="tool_name"),
        call_open="<|START_ACTION|>",
        call_close="<|END_ACTION|>",
    ),
    ToolFormat(
        "qwen3_coder",
        TaggedLayout(value_padding="\n"),
        aliases=("qwen3_xml", "step3p5"),
        padding="\n",
        separator="\n",
        call_open="<tool_call>",
        call_close="</tool_call>",
    ),
    ToolFormat(
        "mimo", TaggedLayout(line_end=""), call_open="<tool_call>", call_close="</tool_call>"
    ),
    ToolFormat(
        "llama3_json",
        JsonLayout("parameters"),
        aliases=("llama4_json", "llama3"),
        call_open="<|python_tag|>",
        separator="; ",
        is_tagless=True,
    ),
    ToolFormat(
        "pythonic",
        PythonicLayout(),
        aliases=("llama4_pythonic",),
        section_open="<|python_start|>",
        section_close="<|python_end|>",
        is_tagless=True,
    ),
    ToolFormat(
        "olmo3",
        PythonicLayout(open="", close="", separator="\n"),
        section_open="<function_calls>",
        section_close="</function_calls>",
    ),
    ToolFormat(
        "deepseek_v3",
        MarkedNameLayout("\n```json\n", "\n```", kind="function", kind_close="<｜tool▁sep｜>"),
        aliases=("deepseekv3",),
        separator="\n",
        section_open="<｜tool▁calls▁begin｜>",
        section_close="<｜tool▁calls▁end｜>",
        call_open="<｜tool▁call▁begin｜>",
        call_close="<｜tool▁call▁end｜>",
    ),
    ToolFormat(
        "deepseek_v31",
        MarkedNameLayout("<｜tool▁sep｜>"),
        aliases=("deepseekv31",),
        section_open="<｜tool▁calls▁begin｜>",
        section_close="<｜tool▁calls▁end｜>",
        call_open="<｜tool▁call▁begin｜>",
        call_close="<｜tool▁call▁end｜>",
    ),
    ToolFormat(
        "glm45",
        PairsLayout(),
        aliases=("glm",),
        separator="\n",
        call_open="<tool_call>",
        call_close="</tool_call>",
    ),
    ToolFormat(
        "glm47",
        PairsLayout(line_end=""),
        aliases=("ling3", "poolside_v1"),
        call_open="<tool_call>",
        call_close="</tool_call>",
    ),
    ToolFormat(
        "nemotron_json",
        JsonLayout(is_list=True),
        call_open="<TOOLCALL>",
        call_close="</TOOLCALL>",
    ),
    ToolFormat(
        "ernie45",
        JsonLayout(),
        aliases=("ernie-45-vl-thinking", "ernie-x1", "ernie_x1"),
        padding="\n",
        separator="\n",
        call_open="<tool_call>",
        call_close="</tool_call>",
    ),
    ToolFormat(
        "kimi_k2",
        MarkedNameLayout("<|tool_call_argument_begin|>", name_open="functions.", index_open=":"),
        section_open="<|tool_calls_section_begin|>",
        section_close="<|tool_calls_section_end|>",
        call_open="<|tool_call_begin|>",
        call_close="<|tool_call_end|>",
        ids="kimi",
    ),
    ToolFormat("granite", JsonLayout(is_list=True), call_open="<|tool_call|>"),
    ToolFormat("phi4_mini_json", JsonLayout(is_list=True), call_open="functools"),
    ToolFormat(
        "minimax_m2",
        _INVOKE,
        aliases=("minimax-m2",),
        section_open="<minimax:tool_call>",
        section_close="</minimax:tool_call>",
        padding="\n",
        separator="\n",
    ),
    ToolFormat(
        "dots",
        _INVOKE,
        section_open="<dots_function_call>",
        section_close="</dots_function_call>",
        padding="\n",
        separator="\n",
    ),
    ToolFormat(
        "internlm",
        JsonLayout("parameters"),
        aliases=("interns1", "intern-s1"),
        padding="\n",
        separator="\n",
        call_open="<|action_start|><|plugin|>",
        call_close="<|action_end|>",
        tokens=("<|action_start|>", "<|plugin|>"),
    ),
    ToolFormat(
        "seed_oss",
        TaggedLayout(),
        call_open="<seed:tool_call>",
        call_close="</seed:tool_call>",
        padding="\n",
        separator="\n",
    ),
    ToolFormat(
        "minimax_m3",
        ElementsLayout(
            function_open=']<]minimax[>[<invoke name="',
            function_close="]<]minimax[>[</invoke>",
            tag_open="]<]minimax[>[<",
        ),
        aliases=("minimax-m3",),
        section_open="]<]minimax[>[<tool_call>",
        section_close="]<]minimax[>[</tool_call>",
        padding="\n",
        separator="\n",
        tokens=("]<]minimax[>[",),
    ),
    ToolFormat(
        "muse_glimmer",
        TaggedLayout(
            function_open='<atem:invoke name="',
            parameter_open='<atem:parameter name="',
            name_close='">',
            parameter_close="</atem:parameter>",
            function_close="</atem:invoke>",
        ),
        section_open="<atem:function_calls>",
        section_close="</atem:function_calls>",
        padding="\n",
        separator="\n",
        frame=AddressedLayout(),
    ),
    ToolFormat("inkling", BlocksLayout()),
    ToolFormat("openai", HarmonyLayout(), aliases=("gpt-oss", "gpt_oss")),
)

TOOL_FORMATS = {name: each for each in _FORMATS for name in (each.name, *each.aliases)}


def find_tool_format(name: str, added_tokens: Container[str]) -> ToolFormat | None:
    """The format of a parser's name for a vocabulary; None for an unknown name.

    Mistral's models have had another format since ``[ARGS]`` is in their vocabulary; the markers of
    Hy3's have a suffix in some.
    """
    found = TOOL_FORMATS.get(name)
    if found is MISTRAL and "[ARGS]" in added_tokens:
        return MISTRAL_V11
    if found is HY_V3 and HY_V3_OPEN_SOURCE.call_open in added_tokens:
        return HY_V3_OPEN_SOURCE
    return found
