"""Tools in a request."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from shared.wire.messages import MAX_TOOLS, TOOL_NAME

ToolName = Annotated[str, Meta(pattern=rf"^{TOOL_NAME}\Z")]


class Function(Struct):
    """``parameters`` is a JSON schema; without one the function takes none."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Struct, tag_field="type", tag="function"):
    function: Function


class FunctionName(Struct):
    name: str


class NamedTool(Struct, tag_field="type", tag="function"):
    function: FunctionName


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


ToolChoiceField = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice
FunctionChoice = Literal["none", "auto"] | FunctionName
