"""The formats of families, as the core asks for them."""

from collections.abc import Container

from shared.dialects.families.reasoning import REASONING_FORMATS, find_reasoning_format
from shared.dialects.families.recognise import recognise
from shared.dialects.families.tools import TOOL_FORMATS, find_tool_format
from shared.dialects.formats import Formats, ReasoningFormat, ToolFormat


class FormatsOfFamilies(Formats):
    tools = TOOL_FORMATS
    reasoning = REASONING_FORMATS

    def find_tools(self, name: str, added_tokens: Container[str]) -> ToolFormat | None:
        return find_tool_format(name, added_tokens)

    def find_reasoning(self, name: str, added_tokens: Container[str]) -> ReasoningFormat | None:
        return find_reasoning_format(name, added_tokens)

    def recognise(self, template: str, added_tokens: Container[str]) -> tuple[str, str]:
        return recognise(template, added_tokens)
