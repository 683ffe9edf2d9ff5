"""Models' outputs with tool calls, and their meaning."""

import re

from tests.services.gateway.text.replies import Told

TAGS = {"": "<|open|>", "/": "<|close|>"}

NOW = ("call", "now", "{}")
PARIS = ("call", "weather", '{"city": "Paris"}')

HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HERMES_PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CODER_PARIS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>"
)
V3_PARIS = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜>'
)
V3_NOW = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
KIMI_NOW = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_PARIS = (
    "<|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|>'
)


def kimi(calls: str) -> str:
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def deepseek(calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def weather(arguments: str) -> tuple[str, str, str]:
    return ("call", "weather", arguments)


def coder(parameters: str) -> str:
    return f"<tool_call>\n<function=weather>\n{parameters}</function>\n</tool_call>"


def glm(pairs: str) -> str:
    return f"<tool_call>weather\n{pairs}</tool_call>"


def hy(call: str) -> str:
    return f"<tool_calls>\n<tool_call>{call}</tool_call>\n</tool_calls>"


def dsml(calls: str, section: str = "tool_calls") -> str:
    return f"<｜DSML｜{section}>\n{calls}</｜DSML｜{section}>".replace("<DS:", "<｜DSML｜").replace(
        "</DS:", "</｜DSML｜"
    )


def kimi_k3(calls: str) -> str:
    """``<|open|>`` and ``<|close|>`` are tags of XML in ``calls``."""
    tags = re.sub(r"<(/?)([^<>|]+)>", lambda tag: TAGS[tag[1]] + tag[2] + "<|sep|>", calls)
    return f"<|open|>tools<|sep|>{tags}<|close|>tools<|sep|>"


def m3(calls: str) -> str:
    return f"<tool_call>\n{calls}\n</tool_call>".replace("<", "]<]minimax[>[<")


def invoke(parameters: str) -> str:
    return f'<invoke name="weather">\n{parameters}</invoke>\n'


CITY = '<parameter name="city">Paris</parameter>\n'


def atem(calls: str) -> str:
    """In Muse Glimmer's form."""
    names = re.sub(r"<(/?)", r"<\1atem:", calls)
    return f"<atem:function_calls>\n{names}</atem:function_calls>"


# Correct outputs.
GOOD: list[tuple[str, str, list[Told]]] = [
    ("hermes", HERMES_NOW, [NOW]),
    ("hermes", f"{HERMES_PARIS}\n{HERMES_NOW}", [PARIS, NOW]),
    ("hermes", f"{HERMES_PARIS}{HERMES_NOW}", [PARIS, NOW]),
    ("hermes", f"Let me see.\n{HERMES_PARIS}\n", [("content", "Let me see."), PARIS]),
    ("hermes", f"\n\n{HERMES_PARIS}\n\nDone.\n", [PARIS, ("content", "Done.\n")]),
    ("ernie45", f"{HERMES_PARIS}\n{HERMES_NOW}\n", [PARIS, NOW]),
    ("qwen3_coder", f"{CODER_PARIS}\n{CODER_PARIS}", [PARIS, PARIS]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [NOW]),
    ("mimo",
     "<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>",
     [PARIS]),
    ("seed_oss",
     "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n"
     "</seed:tool_call>", [PARIS]),
    ("minimax_m2", "<minimax:tool_call>\n"
     + invoke('<parameter name="city">Paris</parameter>\n') * 2 + "</minimax:tool_call>",
     [PARIS, PARIS]),
    ("dots", "I look.\n<dots_function_call>\n"
     + invoke('<parameter name="city">Paris</parameter>\n')
     + '<invoke name="now">\n</invoke>\n</dots_function_call>',
     [("content", "I look."), PARIS, NOW]),
    ("muse_glimmer",
     f" to=weather<|message|>{atem(invoke(CITY))}<|eom|><|start|>assistant to=now.now<|message|>"
     + atem('<invoke name="now.now">\n</invoke>\n') + "<|eot|>", [PARIS, NOW]),
    ("muse_glimmer",
     " to=user<|message|>Let me see.<|eom|><|start|>assistant to=weather<|message|>"
     + atem(invoke(CITY)), [("content", "Let me see."), PARIS]),
    ("muse_glimmer", "no header", [("content", "no header")]),
    ("internlm",
     'I look.<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Paris"}}\n'
     '<|action_end|>\n<|action_start|><|plugin|>{"name": "now", "parameters": {}}<|action_end|>',
     [("content", "I look."), PARIS, NOW]),
    ("llama3_json",
     '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
     [PARIS, NOW]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', [NOW]),
    ("llama3_json", '{"type": "function", "name": "now", "arguments": {}}', [NOW]),
    ("pythonic", "[weather(city='Paris'), now()]", [PARIS, NOW]),
    ("pythonic", '<|python_start|>[weather(city="Paris")]<|python_end|>', [PARIS]),
    ("lfm2", "<|tool_call_start|>[weather(city='Paris'), now()]<|tool_call_end|>", [PARIS, NOW]),
    ("cohere_command3",
     '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters":'
     ' {"city": "Paris"}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n'
     "]<|END_ACTION|>", [PARIS, NOW]),
    ("olmo3", '<function_calls>\nweather(city="Paris")\nnow()\n</function_calls>', [PARIS, NOW]),
    ("deepseek_v3", deepseek(f"{V3_PARIS}\n{V3_NOW}"), [PARIS, NOW]),
    ("deepseek_v31",
     deepseek('<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>' * 2),
     [PARIS, PARIS]),
    ("kimi_k2", kimi(KIMI_NOW + KIMI_PARIS), [NOW, PARIS]),
    ("glm45", glm("<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n")
     + "\n<tool_call>now\n</tool_call>", [PARIS, NOW]),
    ("glm47",
     "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
     "<tool_call>now</tool_call>", [PARIS, NOW]),
    ("hy_v3", hy("weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"),
     [PARIS]),
    ("hy_v3", hy("now<tool_sep>\n</tool_call>\n<tool_call>now<tool_sep>"), [NOW, NOW]),
    ("hy_v3_opensource",
     "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
     "<arg_key:opensource>city</arg_key:opensource>\n"
     "<arg_value:opensource>Paris</arg_value:opensource>\n</tool_call:opensource>\n"
     "</tool_calls:opensource>", [PARIS]),
    ("deepseek_v32",
     dsml('<DS:invoke name="weather">\n<DS:parameter name="city" string="true">Paris'
     '</DS:parameter>\n</DS:invoke>\n<DS:invoke name="now">\n</DS:invoke>\n', "function_calls"),
     [PARIS, NOW]),
    ("deepseek_v4",
     dsml('<DS:invoke name="weather">\n<DS:parameter name="any" string="true">3</DS:parameter>\n'
     '<DS:parameter name="new" string="false">3</DS:parameter>\n'
     '<DS:parameter name="city" string="false">3</DS:parameter>\n'
     '<DS:parameter name="note" string="true">null</DS:parameter>\n</DS:invoke>\n'),
     [weather('{"any": "3", "new": 3, "city": "3", "note": "null"}')]),
    (
        "gemma4",
        'Hm.<|tool_call>call:weather{city:<|"|>Pa"ris<|"|>,days:3,'
        'any:{k-1:[true,null,<|"|><|"|>],a b:{}}'
        "}<tool_call|><|tool_call>call:now{}<tool_call|>",
        [
            ("content", "Hm."),
            weather(r'{"city": "Pa\"ris", "days": 3, "any": {"k-1": [true, null, ""], "a b": {}}}'),
            NOW,
        ],
    ),
    ("minimax_m3",
     m3('<invoke name="weather"><city>Paris</city></invoke>\n<invoke name="now"></invoke>'),
     [PARIS, NOW]),
    (
        "minimax_m3",
        m3(
            '<invoke name="weather">\n<days>3</days><tags><item>a</item><item>3</item></tags>'
            "<any><x>1</x>\n<y><item>true</item></y><x>b</x></any>\n<note>null</note></invoke>"
        ),
        [
            weather(
                '{"days": 3, "tags": ["a", "3"], "any": {"x": [1, "b"], "y": [true]}, "note": null}'
            )
        ],
    ),
    ("kimi_k3",
     kimi_k3('<call tool="weather" index="1"><argument key="city" type="string">Paris</argument>'
     '</call><call tool="now" index="2"></call>'), [PARIS, NOW]),
    ("kimi_k3", "Let me see."
     + kimi_k3('<call tool="weather" index="1"><argument key="a &quot;&amp;quot;" type="array">'
     '[1, "x"]</argument><argument key="any" type="string">[1]</argument></call>'),
     [("content", "Let me see."), weather('{"a \\"&quot;": [1, "x"], "any": "[1]"}')]),
    ("mistral",
     '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, '
     '{"name": "now", "arguments": {}}]', [PARIS, NOW]),
    ("mistral_v11", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
     [PARIS, NOW]),
    ("mistral_v11", '[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"city": "Paris"}', [PARIS]),
    ("nemotron_json", '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', [NOW]),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', [NOW]),
    ("phi4_mini_json", 'functools[{"name": "now", "arguments": {}}]', [NOW]),
    ("inkling",
     'weather<|content_invoke_tool_json|>{"name":"weather","args":{"city": "Paris"}}'
     "<|end_message|><|message_model|>now<|content_invoke_tool_json|>"
     '{"name":"now","args":{}}<|end_message|><|content_model_end_sampling|>', [PARIS, NOW]),
    ("inkling",
     "<|content_text|>Let me see.<|end_message|><|message_model|>now"
     '<|content_invoke_tool_json|>{"name":"now"}<|end_message|>',
     [("content", "Let me see."), NOW]),
    ("openai",
     "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
     '{"city": "Paris"}<|call|>', [PARIS]),
    ("openai",
     ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
     [PARIS]),
    ("openai",
     "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary"
     " to=functions.now<|message|><|call|>", [("content", "Let me see."), NOW]),
]  # fmt: skip

# Outputs that trip parsers, and models' mistakes.
HARD: list[tuple[str, str, list[Told]]] = [
    # markers, names and braces in a string are text
    ("hermes",
     r'<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>{\"name\": \"now\"}}"}}'
     "</tool_call>", [weather(r'{"city": "</tool_call>{\"name\": \"now\"}}"}')]),
    ("hermes",
     r'<tool_call>{"name": "weather", "arguments": '
     r'{"a": {"b": ["}", "\\", "\\\"{"]}, "c": -1.5e3}}' "</tool_call>",
     [weather(r'{"a": {"b": ["}", "\\", "\\\"{"]}, "c": -1.5e3}')]),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>',
     [PARIS]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"id": [1, {"a": "}"}], "name": "now"}</tool_call>', [NOW]),
    ("hermes",
     r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Par\u00eds \ud83d\ude00\\n\"}"}'
     "</tool_call>", [weather(r'{"city": "París 😀\n"}')]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>',
     [weather('"Paris"')]),
    # half a character, which a reply could not hold
    ("hermes", r'<tool_call>{"name": "f\ud83d", "arguments": "{\"a\": \"\ude00\"}"}</tool_call>',
     [("call", "f\ufffd", '{"a": "\ufffd"}')]),
    # unknown functions are the client's to refuse
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     [("call", "other", "{}")]),
    # a brace too many or too few
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>',
     [NOW, ("content", "}\n")]),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}\n</tool_call>\n'
     + HERMES_NOW, [PARIS, NOW]),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"</tool_call>'
     + HERMES_NOW, [weather('{"city": "Paris"'), NOW]),
    # anything but a call is content
    ("hermes", "<tool_call>hello</tool_call>", [("content", "<tool_call>hello</tool_call>")]),
    ("hermes", "a < b <tool_cal", [("content", "a < b <tool_cal")]),
    ("hermes", "Hi </tool_call> there\n", [("content", "Hi </tool_call> there\n")]),
    ("hermes", "<tool_call>\n" + HERMES_NOW, [("content", "<tool_call>"), NOW]),
    ("hermes", '<tool_call>{"a": 1}', [("content", '<tool_call>{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "wea', [("content", '<tool_call>{"name": "wea')]),
    ("hermes", f"One\n{HERMES_NOW}\nTwo {HERMES_NOW} Three",
     [("content", "One"), NOW, ("content", "\n\nTwo"), NOW, ("content", "  Three")]),
    # cut
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pa',
     [weather('{"city": "Pa')]),
    ("hermes", r'<tool_call>{"name": "weather", "arguments": {"c": "\u1', [weather(r'{"c": "\u1')]),
    ("hermes", '<tool_call>{"name": "now", ', [("call", "now", "")]),
    # values by their types
    ("qwen3_coder",
     coder('<parameter=city>\n<b>"1"\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n'),
     [weather(r'{"city": "<b>\"1\"\n", "days": 3}')]),
    ("qwen3_coder",
     coder("<parameter=days>\nmany\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"),
     [weather('{"days": "many", "note": null}')]),
    ("qwen3_coder",
     coder("<parameter=note>\nnull and void\n</parameter>\n<parameter=city>\n12\n</parameter>\n"),
     [weather('{"note": "null and void", "city": "12"}')]),
    ("qwen3_coder",
     coder('<parameter=tags>\n["a", "b"]\n</parameter>\n<parameter=any>\nTrue\n</parameter>\n'),
     [weather('{"tags": ["a", "b"], "any": true}')]),
    ("qwen3_coder", coder("<parameter=any>\n[1, \n</parameter>\n<parameter=new>\n\n</parameter>\n"),
     [weather('{"any": "[1, ", "new": ""}')]),
    ("mimo",
     "<tool_call><function=weather><parameter=city>\nParis\n</parameter></function></tool_call>",
     [weather(r'{"city": "\nParis\n"}')]),
    ("glm45",
     glm("<arg_key>city</arg_key>\n<arg_value>12\n</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>12</arg_value>\n"),
     [weather(r'{"city": "12\n", "days": 12}')]),
    # a missing end of the function, or a truncated value
    ("qwen3_coder",
     "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call> x",
     [PARIS, ("content", "x")]),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nPar",
     [weather('{"city": "Par')]),
    ("qwen3_coder",
     "<tool_call>\n<function=weather>\nhm, well\n<parameter=city>\nParis\n</parameter>\n"
     "</function>", [PARIS, ("content", "hm, well\n")]),
    # a missing start of the call
    ("qwen3_coder", "Hi\n<function=now>\n</function>\n</tool_call>\n<function=other>\n</function>",
     [("content", "Hi"), NOW, ("content", "\n\n<function=other>\n</function>")]),
    ("minimax_m2", f"<minimax:tool_call>\n{invoke('')}and\n{invoke('')}</minimax:tool_call>",
     [weather("{}"), ("content", "and"), weather("{}")]),
    ("qwen3_coder", "<tool_call>\n<function=wea", [("content", "<tool_call>\n<function=wea")]),
    # invalid arguments are content, unless the text ends in them
    ("qwen3_coder", coder("<parameter=city\nParis\n"),
     [weather("{}"), ("content", "<parameter=city\nParis\n</function>\n")]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=ci", [("call", "now", "")]),
    ("glm45", glm("<arg_key>city: Paris\n"),
     [weather("{}"), ("content", "<arg_key>city: Paris\n")]),
    ("glm45", "<tool_call>now\n<arg_key>ci", [("call", "now", "")]),
    ("pythonic", "[weather(Paris)]", [weather("{}"), ("content", "Paris)]")]),
    ("glm45", "<tool_call>a b</tool_call>", [("content", "<tool_call>a b</tool_call>")]),
    ("glm45", glm("<arg_key>days</arg_key>\n<arg_value>1"), [weather('{"days": 1</tool_call>')]),
    # without markers only a function's name makes a call
    ("llama3_json", '{"name": "other", "parameters": {}}',
     [("content", '{"name": "other", "parameters": {}}')]),
    ("llama3_json", '{"answer": {"name": "now"}}\n',
     [("content", '{"answer": {"name": "now"}}\n')]),
    ("llama3_json", '<|python_tag|>print("{}")', [("content", '<|python_tag|>print("{}")')]),
    ("llama3_json", '{"name": "now"}; <|python_tag|>{"name": "now"}', [NOW, NOW]),
    ("pythonic", "[now()]<|python_end|>", [NOW]),
    ("llama3_json", '{"name": "now"}; thanks', [NOW, ("content", "; thanks")]),
    ("pythonic", "[1, 2, 3] is a list", [("content", "[1, 2, 3] is a list")]),
    ("pythonic", "[other(a=1)]", [("content", "[other(a=1)]")]),
    (
        "pythonic",
        r"""[weather(city='it\'s "é"\n', days=3, """
        """any={'a': [True, None, .5, (1,)], 2: -1e3}, tags=[])]""",
        [
            weather(
                r'{"city": "it' + "'" + r's \"é\"\n", "days": 3, '
                '"any": {"a": [true, null, 0.5, [1]], "2": -1e3}, "tags": []}'
            )
        ],
    ),
    # an integer beyond floats, and one that Python does not write
    ("pythonic", f"[weather(a=0x{'f' * 300}, b=0x{'f' * 4000}, c=1_{'0' * 320})]",
     [weather(f'{{"a": {16**300 - 1}, "b": "0x{"f" * 4000}", "c": 1{"0" * 320}}}')]),
    ("minimax_m3", m3('<invoke name="weather"><city>a <b>c</b></city><tags></tags></invoke>'),
     [weather('{"city": "a ]<]minimax[>[<b>c]<]minimax[>[</b>", "tags": []}')]),
    ("minimax_m3", m3('<invoke name="weather"><city>Paris</city>'), [PARIS]),
    ("minimax_m3", m3('<invoke name="now"><x>1'), [("call", "now", '{"x": ')]),
    ("minimax_m3", m3('<invoke name="now">hm</invoke>'),
     [NOW, ("content", "hm]<]minimax[>[</invoke>\n")]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Pa', [weather('{"city": "Pa')]),
    ("gemma4", '<|tool_call>call:weather{ "any" : New York , tags:[ a b, 1.5 ] , }<tool_call|> x',
     [weather('{"any": "New York", "tags": ["a b", 1.5]}'), ("content", "x")]),
    ("gemma4", "<|tool_call>call:weather{city}<tool_call|>", [weather("{"), ("content", "city}")]),
    ("gemma4", "<|tool_call>call:{}", [("content", "<|tool_call>call:{}")]),
    ("pythonic", "[weather(city='Pa", [weather('{"city": "Pa')]),
    # sections
    ("deepseek_v3", f"Let me see. {deepseek(V3_PARIS)}Done.",
     [("content", "Let me see."), PARIS, ("content", " Done.")]),
    ("deepseek_v3", deepseek(V3_PARIS.replace("Paris", "```{<｜tool▁call▁end｜>")),
     [weather('{"city": "```{<｜tool▁call▁end｜>"}')]),
    ("deepseek_v3", deepseek("nothing"), [("content", deepseek("nothing"))]),
    ("kimi_k2", KIMI_NOW, [NOW]),
    ("kimi_k2",
     kimi("<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>"),
     [NOW]),
    ("inkling", '<|message_model|>now<|content_invoke_tool_json|>{"name":"now"}<|end_message|>',
     [NOW]),
    ("inkling", "no blocks, but text", [("content", "no blocks, but text")]),
    ("inkling", "weather", [("content", "weather")]),
    ("inkling", "f<|content_invoke_tool_json|>[1]<|end_message|> x",
     [("content", "<|content_invoke_tool_json|>[1] x")]),
    ("inkling", 'now<|content_invoke_tool_json|>{"name":"weather","args":{"city": "Pa',
     [weather('{"city": "Pa')]),
    ("inkling", '<|content_invoke_tool_json|>{"name":"weather","args":{"city": "<|end_message|>',
     [weather('{"city": "<|end_message|>')]),
    ("mistral", "[TOOL_CALLS] is a marker", [("content", "[TOOL_CALLS] is a marker")]),
    ("mistral_v11", "[TOOL_CALLS] is {[ARGS]{", [("content", "[TOOL_CALLS] is {[ARGS]{")]),
]  # fmt: skip
