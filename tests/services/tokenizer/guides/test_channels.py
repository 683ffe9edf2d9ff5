"""Answers and calls in channels: the frame around them is held, and reasoning may come before."""

import json

import pytest

from services.tokenizer.guides.compose import Wanted, compose
from shared.dialects.formats import BlocksLayout, HarmonyLayout
from shared.dialects.known import KNOWN
from shared.wire.messages import Guide, OutputFormat, OutputStart, ToolChoice
from tests.services.tokenizer.guides.conftest import Vocabulary, vocabulary_with

ANSWER, UNDECIDED = OutputStart.ANSWER, OutputStart.UNDECIDED
CHOICE = OutputFormat("choice", "guided_choice", '["yes", "no"]')
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = json.dumps(
    [
        {"function": {"name": "weather", "strict": True, "parameters": WEATHER}},
        {"function": {"name": "now"}},
    ]
)
REQUIRED = ToolChoice("required")
ONE = ToolChoice("required", ["weather"], is_parallel=False)
THOUGHT = "<|channel|>analysis<|message|>Hm < hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Rome"}<|call|>'
)
BLOCK = (
    'weather<|content_invoke_tool_json|>{"name":"weather","args":{"city": "Rome"}}<|end_message|>'
)
NOW = '<|message_model|>now<|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|>'
TEXT = "<|content_text|>It < rains.<|end_message|>"
LAST = "<|content_model_end_sampling|>"
MUSED = " to=self<|message|>Hm < hm.<|eom|><|start|>assistant"
SAID = " to=user<|message|>Let me see.<|eom|><|start|>assistant"
TO_USER = " to=user<|message|>"
ATEM = (
    ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
    '<atem:parameter name="city">Rome</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def channels(request: pytest.FixtureRequest) -> Vocabulary:
    names = "openai", "inkling", "muse_glimmer"
    markers = {each for name in names for each in KNOWN.tools[name].markers}
    tokens = sorted(marker for marker in markers if marker.startswith("<|"))
    return vocabulary_with(*(tokens if request.param else ()))


def grammar_of(
    vocabulary: Vocabulary, names: tuple[str, str], wanted: Wanted, start: OutputStart = UNDECIDED
) -> str:
    guide: Guide | None = compose(vocabulary.dialect(*names), wanted, start)
    assert guide is not None
    return guide.grammar


HARMONY, BLOCKS = ("openai", "openai_gptoss"), ("inkling", "inkling")
ADDRESSED = ("muse_glimmer", "muse_glimmer")
TABLE = [
    # formats, wanted, start, texts that are held, texts that are not
    (
        HARMONY,
        Wanted(CHOICE),
        UNDECIDED,
        [f"{FINAL}yes", f"{THOUGHT}{FINAL}no", f"{THOUGHT * 2}{FINAL}no"],
        ["yes", f"{FINAL}perhaps", f"{PREAMBLE}{FINAL}yes", THOUGHT, CALL],
    ),
    (HARMONY, Wanted(CHOICE), ANSWER, ["yes"], [f"{FINAL}yes"]),
    (
        HARMONY,
        Wanted(tools=TOOLS, choice=REQUIRED),
        UNDECIDED,
        [CALL, f"{THOUGHT}{CALL.removesuffix('<|call|>')}"],
        [
            f"{FINAL}yes",
            CALL.replace("Rome", "Oslo"),
            CALL.replace("weather", "then"),
            "",
        ],
    ),
    (HARMONY, Wanted(tools=TOOLS, choice=ONE), UNDECIDED, [CALL], [CALL.replace("weather", "now")]),
    (
        HARMONY,
        Wanted(tools=TOOLS, choice=REQUIRED),
        ANSWER,
        [f"<|end|><|start|>assistant{THOUGHT}{CALL}"],
        [CALL],
    ),
    (
        HARMONY,
        Wanted(tools=TOOLS),
        UNDECIDED,
        [f"{FINAL}It < rains.", f"{THOUGHT}{PREAMBLE}{CALL}", f"{PREAMBLE}{FINAL}Hi"],
        [f"{THOUGHT}{CALL.replace('Rome', 'Oslo')}"],
    ),
    (
        HARMONY,
        Wanted(tools=TOOLS),
        ANSWER,
        ["It rains.", f"Well.<|end|><|start|>assistant{CALL}"],
        [],
    ),
    (HARMONY, Wanted(CHOICE, TOOLS), UNDECIDED, [f"{FINAL}yes", f"{THOUGHT}{CALL}"], [FINAL]),
    (
        BLOCKS,
        Wanted(CHOICE),
        UNDECIDED,
        [
            "<|content_text|>yes",
            f"<|message_model|><|content_text|>no<|end_message|>{LAST}",
        ],
        ["yes", "<|content_text|>perhaps", BLOCK],
    ),
    (BLOCKS, Wanted(CHOICE), ANSWER, ["yes<|end_message|>"], ["<|content_text|>yes"]),
    (
        BLOCKS,
        Wanted(tools=TOOLS, choice=REQUIRED),
        UNDECIDED,
        [BLOCK, f"<|message_model|>{BLOCK}{NOW}{LAST}"],
        [TEXT, BLOCK * 2, BLOCK.replace("Rome", "Oslo"), BLOCK.replace("weather<", "now<"), ""],
    ),
    (
        BLOCKS,
        Wanted(tools=TOOLS, choice=ONE),
        UNDECIDED,
        [BLOCK],
        [f"{BLOCK}<|message_model|>{BLOCK}", NOW],
    ),
    (
        BLOCKS,
        Wanted(tools=TOOLS, choice=REQUIRED),
        ANSWER,
        [f"<|end_message|><|message_model|>{BLOCK}"],
        [BLOCK],
    ),
    (
        BLOCKS,
        Wanted(tools=TOOLS),
        UNDECIDED,
        [TEXT, f"{TEXT}<|message_model|>{BLOCK}{NOW}{LAST}"],
        [BLOCK.replace("Rome", "Oslo")],
    ),
    (BLOCKS, Wanted(CHOICE, TOOLS), UNDECIDED, ["<|content_text|>yes", BLOCK], [TEXT]),
    (
        ADDRESSED,
        Wanted(CHOICE),
        UNDECIDED,
        [f"{TO_USER}yes", f"{MUSED}{TO_USER}no", f"{MUSED * 2}{TO_USER}no"],
        ["yes", f"{TO_USER}perhaps", f"{SAID}{TO_USER}yes", MUSED, ATEM],
    ),
    (ADDRESSED, Wanted(CHOICE), ANSWER, ["yes"], [f"{TO_USER}yes"]),
    (
        ADDRESSED,
        Wanted(tools=TOOLS, choice=REQUIRED),
        UNDECIDED,
        [ATEM, f"{MUSED}{ATEM}<|eot|>", f"{ATEM}<|eom|><|start|>assistant{ATEM}<|eom|>"],
        [
            f"{TO_USER}yes",
            ATEM.replace("Rome", "Oslo"),
            ATEM.replace("to=weather", "to=now"),
            ATEM.replace('"weather', '"then'),
            "",
        ],
    ),
    (
        ADDRESSED,
        Wanted(tools=TOOLS, choice=ONE),
        UNDECIDED,
        [f"{ATEM}<|eom|>"],
        [f"{ATEM}<|eom|><|start|>assistant{ATEM}", ATEM.replace("weather", "now")],
    ),
    (
        ADDRESSED,
        Wanted(tools=TOOLS, choice=REQUIRED),
        ANSWER,
        [f"<|eom|><|start|>assistant{MUSED}{ATEM}"],
        [ATEM],
    ),
    (
        ADDRESSED,
        Wanted(tools=TOOLS),
        UNDECIDED,
        [f"{TO_USER}It < rains.", f"{MUSED}{SAID}{ATEM}", f"{SAID}{TO_USER}Hi"],
        [f"{MUSED}{ATEM.replace('Rome', 'Oslo')}"],
    ),
    (
        ADDRESSED,
        Wanted(tools=TOOLS),
        ANSWER,
        ["It rains.", f"Well.<|eom|><|start|>assistant{ATEM}"],
        [],
    ),
    (ADDRESSED, Wanted(CHOICE, TOOLS), UNDECIDED, [f"{TO_USER}yes", f"{MUSED}{ATEM}"], [TO_USER]),
]


def test_the_frame_of_messages_is_held(channels: Vocabulary, subtests: pytest.Subtests):
    for names, wanted, start, held, others in TABLE:
        grammar = grammar_of(channels, names, wanted, start)
        with subtests.test(names=names, wanted=wanted, start=start):
            for text in held:
                assert channels.refusal(grammar, text) is None, text
            for text in others:
                assert channels.refusal(grammar, text) is not None, text


def test_a_gate_holds_the_reasoning_of_blocks_and_the_grammar_that_of_harmony():
    layouts = (HarmonyLayout(), BlocksLayout())
    vocabulary = vocabulary_with(layouts[0].end, layouts[1].reasoning, layouts[1].end)
    guides = [
        compose(vocabulary.dialect(*names), Wanted(CHOICE), UNDECIDED)
        for names in (HARMONY, BLOCKS)
    ]
    assert [guide.close_ids for guide in guides if guide] == [
        [],
        [vocabulary.added["<|end_message|>"]],
    ]
