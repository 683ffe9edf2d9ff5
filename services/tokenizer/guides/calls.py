"""Calls of tools as a part of a grammar, from the description of a model family's call format.

The frame of a call (markers, names and keys) is exact; the arguments are the tool's.
"""

from services.tokenizer.guides.elements import Elements
from services.tokenizer.guides.json_rule import json_rule
from services.tokenizer.guides.lark import Lark, literal
from services.tokenizer.guides.literals import bare_arguments, pythonic_arguments
from services.tokenizer.guides.raw_arguments import pair_arguments, tagged_arguments
from services.tokenizer.guides.tools import Tool, arguments
from shared.dialects.formats import (
    BareLayout,
    ElementsLayout,
    JsonLayout,
    MarkedNameLayout,
    PairsLayout,
    PythonicLayout,
    TaggedLayout,
    ToolFormat,
)

SPACE = r"/[ ]/"
COMMA = r"/,[ \n]?/"
INDEX = "/[0-9]{1,4}/"
NO_CALL = r"/[ \n]*([^ \n{\[](.|\n)*)?/"


class Calls:
    """Calls of ``tools`` in a format."""

    def __init__(self, lark: Lark, format: ToolFormat, tools: list[Tool]) -> None:
        self._lark = lark
        self._format = format
        self._one = lark.rule(f"{lark.fixed(self._before_name())} {self._names(tools)}")

    def required(self, is_parallel: bool, has_marker: bool = False) -> str:
        """One call, or more if ``is_parallel``, and nothing else but blanks before; ``has_marker``:
        the first marker may not be left out."""
        opening = self._lark.fixed(self._opening) if has_marker else self._open(self._opening)
        return f"{self._lark.blanks()} {opening} {self._after_opening(is_parallel, True)}"

    def in_text(self, is_parallel: bool) -> str:
        """Any text in which the first marker of a call begins one of these."""
        lark = self._lark
        if self._format.is_tagless:  # the calls, or a text that does not begin as they do
            calls = lark.rule(self.required(is_parallel))
            return f"{calls} | {lark.terminal(NO_CALL)}"
        part = lark.rule(f"{lark.lazy(self._opening)} {self._after_opening(is_parallel, False)}")
        return f"{part}{'*' if is_parallel else '?'} {lark.any_text()}"

    @property
    def _opening(self) -> str:
        return self._format.section_open or self._format.call_open

    def _open(self, marker: str) -> str:
        text = self._lark.fixed(marker)
        return f"({text})?" if text and self._format.is_tagless else text

    def _after_opening(self, is_parallel: bool, holds_all: bool) -> str:
        """The expression after the first marker. Without ``holds_all`` it holds one separate call:
        the next begins with the marker again."""
        format, fixed = self._format, self._lark.fixed
        padding = self._optional(format.padding)
        if isinstance(format.layout, JsonLayout) and format.layout.is_list:
            return f"/[ ]?/ {self._list(is_parallel)} {fixed(format.call_close)}"
        one = self._one
        if isinstance(format.layout, PythonicLayout):
            calls = self._repeated(one, self._separator(format.layout.separator), is_parallel)
            calls = f"{fixed(format.layout.open)} {calls} {fixed(format.layout.close)}"
            close = fixed(format.section_close)
            close = f"({close})?" if close and format.is_tagless else close
            return f"{padding} {calls} {padding} {close}"
        if format.section_open:
            one = self._lark.rule(f"{fixed(format.call_open)} {one} {fixed(format.call_close)}")
            calls = self._repeated(one, self._separator(format.separator), is_parallel)
            return f"{padding} {calls} {padding} {fixed(format.section_close)}"
        first = f"{padding} {one} {padding} {fixed(format.call_close)}"
        if not (is_parallel and holds_all):
            return first
        again = self._open(format.call_open)
        return f"{first} ({self._separator(format.separator)} {again} {first})*"

    def _list(self, is_parallel: bool) -> str:
        calls = self._repeated(self._one, self._lark.terminal(COMMA), is_parallel)
        return f'"[" {calls} "]"'

    def _repeated(self, one: str, separator: str, is_parallel: bool) -> str:
        return f"{one} ({separator} {one})*" if is_parallel else one

    def _separator(self, text: str) -> str:
        """Blanks alone may be absent or one more; blanks after other text may be absent."""
        if text.strip():
            return f"{self._lark.fixed(text.rstrip(' '))} {self._lark.terminal(SPACE)}?"
        return self._lark.terminal(r"/[ \n]{1,2}/") + "?"

    def _optional(self, padding: str) -> str:
        return f"{self._lark.terminal(literal(padding))}?" if padding else ""

    def _before_name(self) -> str:
        match self._format.layout:
            case JsonLayout(name_key=key):
                return f'{{"{key}": "'
            case TaggedLayout(opening) | ElementsLayout(opening):
                return opening
            case BareLayout(name_open):
                return name_open
            case MarkedNameLayout() as layout:
                return f"{layout.kind}{layout.kind_close}{layout.name_open}"
        return ""

    def _names(self, tools: list[Tool]) -> str:
        """The name of a tool and the rest of its call; of tools with one name, the last."""
        return self._lark.after_texts(dict(map(self._after_name, tools)))

    def _after_name(self, tool: Tool) -> tuple[str, str]:
        """Its name with the text that follows in any call, and the expression for the rest."""
        lark, name = self._lark, tool.name
        match self._format.layout:
            case JsonLayout(key):
                return f'{name}", "{key}": ', f'{json_rule(lark, arguments(tool))} "}}"'
            case TaggedLayout() as layout:
                index = lark.terminal(INDEX) if layout.index_open else ""
                close = lark.fixed(f"{layout.name_close}{layout.line_end}")
                rest = f"{index} {close} {tagged_arguments(lark, layout, tool)}"
                return f"{name}{layout.index_open}", rest
            case PairsLayout() as layout:
                close = lark.fixed(f"{layout.name_close}{layout.line_end}")
                return name, f"{close} {pair_arguments(lark, layout, tool)}"
            case PythonicLayout():
                return f"{name}(", pythonic_arguments(lark, tool)
            case ElementsLayout() as layout:
                return f"{name}{layout.name_close}", Elements(lark, layout).arguments(tool)
            case BareLayout() as layout:
                return f"{name}{{", bare_arguments(lark, layout, tool)
            case MarkedNameLayout() as layout:
                return f"{name}{layout.index_open}", self._marked_arguments(layout, tool)
        raise AssertionError(self._format)

    def _marked_arguments(self, layout: MarkedNameLayout, tool: Tool) -> str:
        lark = self._lark
        words = [
            lark.terminal(INDEX) if layout.index_open else "",
            lark.fixed(layout.arguments_open),
            json_rule(lark, arguments(tool)),
            lark.fixed(layout.arguments_close),
        ]
        return " ".join(filter(None, words))
