"""Nothing is lost, nothing is read twice; ids, several calls and marks."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.chat.replies.choice_parser import Arguments, CallStart, Content
from services.gateway.text import source
from services.gateway.text.machine import OutputMachine, OutputRules, TokenMark
from shared.dialects.known import KNOWN
from shared.wire.messages import OutputStart
from tests.services.gateway.text.call_texts import CODER_PARIS, GOOD, HARD
from tests.services.gateway.text.replies import cut, markers_of, marks_of, rules, run, told

NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
NAMES = sorted({each.name for each in KNOWN.tools.values()})
IN_CHANNELS = {each.name for each in KNOWN.tools.values() if each.channels}
WORDS = sorted(
    {text for each in KNOWN.tools.values() for text in each.markers}
    | {"now", "weather", "<think>", "</think>", '"', "\\", "{", "}", "[", "]", "(", ")", ":", ","}
    | {
        '{"name": "now"',
        '"arguments": {',
        '"parameters": "',
        "name>",
        "=",
        " ",
        "\n",
        "é",
        "1",
        ";",
    }
    | {"now[ARGS]{", "<function=now>", "now(a=", "<parameter=city>", "functions.now:0", "to="}
)
texts = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, str]:
    """A text of the tables with a deletion and an insertion."""
    name, text, _ = draw(st.sampled_from([*GOOD, *HARD]))
    begin, end, place = sorted(draw(st.integers(0, len(text))) for _ in range(3))
    return name, text[:begin] + text[end:place] + draw(texts) + text[place:]


replies = st.one_of(damaged(), st.tuples(st.sampled_from(NAMES), texts))


def feed(of: OutputRules, text: str, seed: str = "id/0") -> list[Any]:
    return run(of, cut(text, [], []), OutputStart.UNDECIDED, seed)


@given(replies, st.booleans(), st.data())
def test_any_text_is_the_same_however_it_is_cut(
    reply: tuple[str, str], has_tokens: bool, data: st.DataObject
):
    name, text = reply
    of = rules(name, "qwen3")
    of = rules(name, "qwen3", added_tokens=markers_of(of) if has_tokens else ())
    marks = marks_of(text, markers_of(of)) if has_tokens else []
    whole = told(run(of, cut(text, marks, []), OutputStart.UNDECIDED))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    assert told(run(of, cut(text, marks, places), OutputStart.UNDECIDED)) == whole
    by_characters = cut(text, marks, range(1, len(text)))
    assert told(run(of, by_characters, OutputStart.UNDECIDED)) == whole


@given(replies)
def test_a_text_without_calls_and_reasoning_comes_back(reply: tuple[str, str]):
    name, text = reply
    of = rules(name)
    events = told(feed(of, text))
    if name not in IN_CHANNELS and not any(kind == "call" for kind, *_ in events):
        assert "".join(each for _, each in events) == text


def test_text_around_calls_is_not_lost(subtests: pytest.Subtests):
    """Unique letters around a possible call; text outside channels is dropped."""
    for name, text, _ in GOOD:
        with subtests.test(name=name, text=text):
            events = told(feed(rules(name), f"ÄÖ{text}ÜẞÄ"))
            assert name in IN_CHANNELS or events[0][-1].startswith("ÄÖ")
            assert name in IN_CHANNELS or "ÜẞÄ" in "".join(each[-1] for each in events)


LONG_CALLS = {
    "hermes": ('<tool_call>{"name": "weather", "arguments": {"city": "', '"}}</tool_call>'),
    "qwen3_coder": ("<tool_call><function=weather><parameter=city>", "</parameter></function>"),
    "glm45": ("<tool_call>weather<arg_key>any</arg_key><arg_value>", "</arg_value></tool_call>"),
    "pythonic": ("[weather(city='", "')]"),
    "kimi_k2": ('<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"a": "', '"}'),
    "llama3_json": ('{"parameters": {"a": "', '"}, "name": "now"}'),
    "openai": ("<|channel|>commentary to=functions.now<|message|>", "<|call|>"),
    "gemma4": ('<|tool_call>call:now{a:<|"|>', '<|"|>}<tool_call|>'),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|open|>argument key="a"'
        ' type="string"<|sep|>',
        "<|close|>argument<|sep|>",
    ),
    "inkling": ('now<|content_invoke_tool_json|>{"name":"now","args":{"a": "', '"}}'),
    "ernie45": ("<tool_call>", ""),
}


MIDDLES = ("plain <text> and </tool_ca ", r"\n\\", "\n", "[{,", "<")


class CountedPattern:
    """Counts the characters examined by a pattern."""

    num_chars = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def search(self, text: str, start: int) -> re.Match[str] | None:
        found = self._pattern.search(text, start)
        CountedPattern.num_chars += (found.end() if found else len(text)) - start
        return found

    def match(self, text: str, start: int) -> re.Match[str] | None:
        found = self._pattern.match(text, start)
        CountedPattern.num_chars += found.end() - start if found else 1
        return found


def count_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    put, made, scan = source.TextSource.put, source.Markers.__init__, source.scan

    def counted_put(self: source.TextSource, item: Any) -> None:
        put(self, item)
        CountedPattern.num_chars += len(self._text)

    def counted_markers(self: source.Markers, *args: Any) -> None:
        made(self, *args)
        if self.pattern is not None:
            self.pattern = CountedPattern(self.pattern)  # type: ignore[assignment]

    def counted_scan(pattern: re.Pattern[str], text: str, start: int) -> int:
        end = scan(pattern, text, start)
        CountedPattern.num_chars += end - start + 1
        return end

    monkeypatch.setattr(source.TextSource, "put", counted_put)
    monkeypatch.setattr(source.Markers, "__init__", counted_markers)
    monkeypatch.setattr(source, "scan", counted_scan)


def test_a_long_text_is_read_once(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests):
    """The examined characters grow with the text, not with its square."""
    count_looks(monkeypatch)
    for name, (begin, end) in LONG_CALLS.items():
        for middle in MIDDLES:
            is_longest = name == "hermes" and middle == MIDDLES[0]
            size = 1 << 20 if is_longest else 1 << 12
            text = begin + middle * (size // len(middle)) + end
            for num_chars in (size * 2, 500 if is_longest else 3):
                pieces = cut(text, [], range(num_chars, len(text), num_chars))
                CountedPattern.num_chars = 0
                run(rules(name), pieces, OutputStart.ANSWER)
                with subtests.test(name=name, middle=middle, piece=num_chars):
                    assert CountedPattern.num_chars <= 24 * len(text)


def test_arguments_go_out_as_they_come():
    machine = OutputMachine(rules("hermes"), OutputStart.ANSWER, "id/0")
    machine.push('<tool_call>{"name": "weather", "arguments": {"city": "')
    assert machine.push("Pa") == [Arguments(0, "Pa")]
    assert machine.push('ris"') == [Arguments(0, 'ris"')]
    machine = OutputMachine(rules("qwen3_coder"), OutputStart.ANSWER, "id/0")
    machine.push("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert machine.push('"Pa') == [Arguments(0, '\\"Pa')]
    assert machine.push("ris</para") == [Arguments(0, "ris")]


def test_ids_are_the_same_after_a_replay_and_differ_between_calls_and_choices():
    text = NOW * 3
    ids = [each.id for each in feed(rules("hermes"), text) if isinstance(each, CallStart)]
    again = [each.id for each in feed(rules("hermes"), text) if isinstance(each, CallStart)]
    other = [each.id for each in feed(rules("hermes"), text, "id/1") if isinstance(each, CallStart)]
    assert ids == again
    assert len({*ids, *other}) == 6
    assert all(re.fullmatch(r"call_[a-z0-9]{24}", each) for each in ids)


def test_kimi_and_mistral_have_ids_of_their_own():
    kimi = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    events = feed(rules("kimi_k2"), kimi.format("functions.now:7") + kimi.format("now"))
    starts = [each for each in events if isinstance(each, CallStart)]
    assert [each.id for each in starts] == ["functions.now:7", "functions.now:1"]
    events = feed(rules("mistral_v11"), "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}")
    [first, second] = [each.id for each in events if isinstance(each, CallStart)]
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", first)
    assert second == "a1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"{NOW}\n{NOW} more"),
        ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>'),
        ("llama3_json", '{"name": "now"}; {"name": "now"}'),
        ("pythonic", "[now(), now()]"),
        ("openai", "<|channel|>commentary to=functions.now<|message|>{}<|call|>more"),
    ],
)
def test_text_after_the_only_allowed_call_is_dropped(name: str, text: str):
    of = rules(name, is_parallel=False)
    machine = OutputMachine(of, OutputStart.UNDECIDED, "id/0")
    events = [event for char in text for event in machine.push(char)]
    assert told([*events, *machine.finish()]) == [("call", "now", "{}")]
    assert machine.is_over
    assert machine.num_calls == 1
    at_once = OutputMachine(of, OutputStart.UNDECIDED, "id/0")
    at_once.push(text)
    assert at_once.is_over
    assert at_once.num_chars == machine.num_chars < len(text)


@pytest.mark.parametrize(("arguments", "is_open"), [("{}", False), ('{"a"', True), ("[1]", True)])
def test_a_call_in_channels_may_end_with_the_text_if_its_arguments_do(
    arguments: str, is_open: bool
):
    machine = OutputMachine(rules("openai"), OutputStart.UNDECIDED, "id/0")
    machine.push(f"<|channel|>commentary to=functions.now<|message|>{arguments}")
    machine.finish()
    assert machine.has_open_call == is_open


def test_calls_are_content_where_none_are_looked_for():
    assert told(feed(rules(reasoning="qwen3"), f"<think>hm</think>\n{CODER_PARIS}")) == [
        ("reasoning", "hm"),
        ("content", CODER_PARIS),
    ]


def test_a_mark_may_come_before_its_text_and_its_text_in_two_parts():
    of = rules("hermes", added_tokens=markers_of(rules("hermes")))
    machine = OutputMachine(of, OutputStart.ANSWER, "id/0")
    assert machine.push("Hi", [TokenMark(2, 11, 1, "<tool_call>")]) == [Content("Hi")]
    assert machine.push("<tool") == []
    assert machine.push('_call>{"name": "now"') == [CallStart(0, machine_id(), "now")]


def machine_id() -> str:
    [start] = feed(rules("hermes"), '<tool_call>{"name": "now"')
    return str(start.id)


def test_a_token_that_is_cut_is_text():
    of = rules("hermes", added_tokens=markers_of(rules("hermes")))
    pieces = [("Hi <tool", [TokenMark(3, 11, 1, "<tool_call>")])]
    assert told(run(of, pieces, OutputStart.ANSWER)) == [("content", "Hi <tool")]


def test_tokens_that_no_format_knows_are_text():
    marks = [TokenMark(0, 5, 0, "<unk>"), TokenMark(8, 0, 4, "<|im_end|>")]
    of = rules("hermes", added_tokens={"<unk>", "<|im_end|>", *markers_of(rules("hermes"))})
    assert told(run(of, [("<unk> Hi", marks)], OutputStart.ANSWER)) == [("content", "<unk> Hi")]
