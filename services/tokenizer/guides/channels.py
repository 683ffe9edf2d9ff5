"""Calls and answers as messages in channels: the frame around them is a part of the grammar."""

from services.tokenizer.guides.calls import Calls
from services.tokenizer.guides.json_rule import json_rule
from services.tokenizer.guides.lark import Lark, literal
from services.tokenizer.guides.tools import Tool, arguments
from shared.dialects.formats import (
    AddressedLayout,
    BlocksLayout,
    Channels,
    HarmonyLayout,
    ToolFormat,
)
from shared.wire.messages import OutputStart

ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
ITSELF, USER = "self", "user"


class HarmonyFrame:
    """The grammar allows the reasoning, too. A reply has one call, whose marker ends the text."""

    has_reasoning = True

    def __init__(self, lark: Lark, start: OutputStart) -> None:
        self._lark = lark
        self._layout = HarmonyLayout()
        self._next = lark.fixed(f"{self._layout.start}assistant")
        self._is_answer = start is OutputStart.ANSWER
        self._end = lark.fixed(self._layout.end)

    def answer(self, answer: str) -> str:
        if self._is_answer:
            return answer
        return f"{self._messages(ANALYSIS)} {self._head(FINAL)} ({answer})"

    def required(self, tools: list[Tool], is_parallel: bool) -> str:
        before = f"{self._end} {self._next}" if self._is_answer else ""
        return f"{before} {self._messages(ANALYSIS)} {self._call(tools)}"

    def in_text(self, tools: list[Tool], is_parallel: bool) -> str:
        final = f"{self._head(FINAL)} {self._lark.any_text()}"
        rest = f"{self._messages(ANALYSIS, COMMENTARY)} ({self._call(tools)} | {final})"
        if self._is_answer:
            return f"{self._lark.any_text()} ({self._end} {self._next} {rest})?"
        return rest

    def _head(self, channel: str) -> str:
        return self._lark.fixed(f"{self._layout.channel}{channel}{self._layout.message}")

    def _messages(self, *channels: str) -> str:
        """Any number of messages before the last one."""
        body = f"{self._lark.lazy(self._layout.end)} {self._next}"
        ways = " | ".join(f"{self._head(channel)} {body}" for channel in channels)
        return f"{self._lark.rule(ways)}*"

    def _call(self, tools: list[Tool]) -> str:
        lark, layout = self._lark, self._layout
        opening = f"{layout.channel}{COMMENTARY} to={layout.recipient_open}"
        after = lark.fixed(f"{layout.constrain}json{layout.message}")
        calls = lark.after_texts(
            {f"{each.name} ": f"{after} {json_rule(lark, arguments(each))}" for each in tools}
        )
        return lark.rule(f"{lark.fixed(opening)} {calls} ({lark.fixed(layout.end_of_calls)})?")


class BlocksFrame:
    """Blocks of reasoning may only come before."""

    has_reasoning = False

    def __init__(self, lark: Lark, start: OutputStart) -> None:
        self._lark = lark
        self._layout = BlocksLayout()
        self._start = lark.fixed(self._layout.start)
        self._is_answer = start is OutputStart.ANSWER
        self._end = lark.fixed(self._layout.end)
        self._last = f"({lark.fixed(self._layout.end_of_reply)})?"

    def answer(self, answer: str) -> str:
        opening = f"({self._start})? {self._lark.fixed(self._layout.text)}"
        return f"{'' if self._is_answer else opening} ({answer}) ({self._end})? {self._last}"

    def required(self, tools: list[Tool], is_parallel: bool) -> str:
        call = self._call(tools)
        before = f"{self._end} {self._start}" if self._is_answer else f"({self._start})?"
        more = f"({self._start} {call})*" if is_parallel else ""
        return f"{before} {call} {more} {self._last}"

    def in_text(self, tools: list[Tool], is_parallel: bool) -> str:
        lark, start = self._lark, self._start
        text = lark.lazy(self._layout.end)
        block = lark.rule(f"{lark.fixed(self._layout.text)} {text}")
        item = lark.rule(f"{block} | {self._call(tools)}")
        blocks = f"({item if is_parallel else block} {start})* {item}"
        if self._is_answer:
            return f"{text} ({start} {blocks})? {self._last}"
        return f"({start})? {blocks} {self._last}"

    def _call(self, tools: list[Tool]) -> str:
        calls = self._lark.after_texts({each.name: self._after_name(each) for each in tools})
        return self._lark.rule(calls)

    def _after_name(self, tool: Tool) -> str:
        lark, layout = self._lark, self._layout
        opening = literal(f'{{"name":"{tool.name}","{layout.arguments_key}":')
        call = f'{opening} {json_rule(lark, arguments(tool))} "}}"'
        return f"{lark.fixed(layout.call)} {call} {self._end}"


class AddressedFrame:
    """The grammar allows the reasoning, too. A message has one call in ``format``, and its marker
    may end the text."""

    has_reasoning = True

    def __init__(self, lark: Lark, start: OutputStart, format: ToolFormat | None) -> None:
        self._lark = lark
        self._layout = AddressedLayout()
        self._format = format
        self._next = lark.fixed(f"{self._layout.start}assistant")
        self._is_answer = start is OutputStart.ANSWER
        self._end = lark.fixed(self._layout.end)

    def answer(self, answer: str) -> str:
        if self._is_answer:
            return answer
        return f"{self._messages(ITSELF)} {self._head(USER)} ({answer})"

    def required(self, tools: list[Tool], is_parallel: bool) -> str:
        before = f"{self._end} {self._next}" if self._is_answer else ""
        return f"{before} {self._messages(ITSELF)} {self._calls(tools, is_parallel)}"

    def in_text(self, tools: list[Tool], is_parallel: bool) -> str:
        final = f"{self._head(USER)} {self._lark.any_text()}"
        calls = self._calls(tools, is_parallel)
        rest = f"{self._messages(ITSELF, USER)} ({calls} | {final})"
        if self._is_answer:
            return f"{self._lark.any_text()} ({self._end} {self._next} {rest})?"
        return rest

    def _head(self, recipient: str) -> str:
        return self._lark.fixed(f" to={recipient}{self._layout.message}")

    def _messages(self, *recipients: str) -> str:
        """Any number of messages before the last one."""
        body = f"{self._lark.lazy(self._layout.end)} {self._next}"
        ways = " | ".join(f"{self._head(recipient)} {body}" for recipient in recipients)
        return f"{self._lark.rule(ways)}*"

    def _calls(self, tools: list[Tool], is_parallel: bool) -> str:
        call = self._call(tools)
        more = f"({self._end} {self._next} {call})*" if is_parallel else ""
        ends = f"{self._end} | {self._lark.fixed(self._layout.end_of_reply)}"
        return f"{call} {more} ({self._lark.rule(ends)})?"

    def _call(self, tools: list[Tool]) -> str:
        """To its own name; of tools with one name, the last."""
        assert self._format is not None
        message, of_name = self._lark.fixed(self._layout.message), {}
        for tool in tools:
            calls = Calls(self._lark, self._format, [tool])
            of_name[tool.name] = f"{message} {calls.required(is_parallel=False)}"
        return self._lark.rule(f"{self._lark.fixed(' to=')} {self._lark.after_texts(of_name)}")


Frame = HarmonyFrame | BlocksFrame | AddressedFrame


def frame_of(
    lark: Lark, channels: Channels | None, start: OutputStart, format: ToolFormat | None
) -> Frame | None:
    """``format`` is the one of calls."""
    match channels:
        case HarmonyLayout():
            return HarmonyFrame(lark, start)
        case BlocksLayout():
            return BlocksFrame(lark, start)
        case AddressedLayout():
            return AddressedFrame(lark, start, format)
    return None


class FramedCalls:
    """Calls of ``tools`` in channels."""

    def __init__(self, frame: Frame, tools: list[Tool]) -> None:
        self._frame = frame
        self._tools = tools

    def required(self, is_parallel: bool, has_marker: bool = False) -> str:
        return self._frame.required(self._tools, is_parallel)

    def in_text(self, is_parallel: bool) -> str:
        return self._frame.in_text(self._tools, is_parallel)
