"""A chat as the text that the model reads."""

import secrets
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from services.tokenizer.chat.bounded import TooMuchTime
from services.tokenizer.chat.normalize import Message, normalize
from services.tokenizer.chat.template import TEMPLATE_ERRORS
from services.tokenizer.chat.template_options import read_options
from services.tokenizer.chat.templates import ChatTemplates
from shared.errors import InvalidRequest
from shared.wire.messages import ChatOptions

# Follows the text that the model is to continue while a template renders it. Unknown to
# clients, so none can write it; with a blank at its end, so that a template that strips shows.
END_OF_MESSAGE = f"END-OF-MESSAGE-{secrets.token_hex(8)} "
CONTINUES = "continue_final_message"
TOO_SLOW = "chat_template_too_slow"


def render_prompt(
    templates: ChatTemplates,
    special_tokens: dict[str, str],
    messages: list[Message],
    options: ChatOptions,
    max_chars: int,
    defaults: Mapping[str, Any],
) -> str:
    """Renders a prompt; ``defaults`` are variables that a request may leave out. Raises
    InvalidRequest naming the client's field, TooMuchText above ``max_chars``."""
    variables = read_options(options, special_tokens)
    tools = variables["tools"]
    template = templates.find(options.template, tools is not None)
    with _shallow("tools"):
        if tools is not None:
            variables["tools"] = readable_tools(tools, template.traits.takes_for_granted)
    with _shallow("messages"):
        normalized = normalize(messages, template.traits)
    if options.continues_final_message:
        has_text = bool(messages) and messages[-1].get("content") is not None
        _mark_end(normalized, has_text)
    variables = {**special_tokens, **defaults, **variables, "messages": normalized}
    try:
        prompt = template.render(variables, max_chars)
    except TooMuchTime as error:
        raise _refusal(options, error, TOO_SLOW) from None
    except TEMPLATE_ERRORS as error:
        raise _refusal(options, error) from None
    return _cut_at_end(prompt) if options.continues_final_message else prompt


@contextmanager
def _shallow(param: str) -> Iterator[None]:
    """Raises InvalidRequest if the field ``param`` is nested more deeply than Python's stack."""
    try:
        yield
    except RecursionError:
        raise InvalidRequest(f"{param} are nested too deeply", param=param) from None


def _refusal(options: ChatOptions, error: BaseException, code: str | None = None) -> InvalidRequest:
    if options.template:
        return InvalidRequest(f"chat_template fails: {error}", param="chat_template", code=code)
    text = f"the model's chat template refuses these messages: {error}"
    return InvalidRequest(text, param="messages", code=code)


def _mark_end(messages: list[Message], has_text: bool) -> None:
    """Adds the mark to the last text of the last message, if the client gave it any."""
    content: Any = messages[-1].get("content") if has_text else None
    if isinstance(content, str):
        messages[-1]["content"] = content + END_OF_MESSAGE
    elif content and "text" in content[-1]:
        content[-1]["text"] += END_OF_MESSAGE
    else:
        raise InvalidRequest(
            f"{CONTINUES} is true, but the last message holds no text to continue", param=CONTINUES
        )


def _cut_at_end(prompt: str) -> str:
    end = prompt.rfind(END_OF_MESSAGE.rstrip())
    if end < 0:
        raise InvalidRequest(
            f"{CONTINUES} is true, but the chat template leaves out the text of the last message",
            param=CONTINUES,
        )
    is_whole = prompt.startswith(END_OF_MESSAGE, end)
    return prompt[:end] if is_whole else prompt[:end].rstrip()


# A null in place of one of these says no more than its absence.
_NULLABLE = {
    *("additionalProperties", "allOf", "anyOf", "description", "enum", "format", "items", "oneOf"),
    *("parameters", "pattern", "properties", "required", "strict", "title", "type"),
}
_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_DATA = {"const", "default", "enum", "examples", "required"}

Tool = dict[str, Any]


def readable_tools(tools: list[Tool], taken_for_granted: Container[str]) -> list[Tool]:
    """``tools`` without nulls that say nothing; a field that is ``taken_for_granted`` and not there
    is empty."""
    return [_readable(_without_nulls(tool), taken_for_granted) for tool in tools]


def _readable(tool: Tool, taken_for_granted: Container[str]) -> Tool:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    empty: Tool = {"description": "", "parameters": {"type": "object", "properties": {}}}
    missing = [name for name in empty if name in taken_for_granted and name not in function]
    filled = function | {name: empty[name] for name in missing}
    parameters = filled.get("parameters")
    if isinstance(parameters, dict) and "properties" in taken_for_granted:
        filled["parameters"] = parameters | {"properties": parameters.get("properties", {})}
    return tool | {"function": filled}


def _without_nulls(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_nulls_in(name, value)
        for name, value in schema.items()
        if value is not None or name not in _NULLABLE
    }


def _without_nulls_in(name: str, value: Any) -> Any:
    """``value`` is the field ``name`` of a schema."""
    if name in _DATA:
        return value
    if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {each: _without_nulls(schema) for each, schema in value.items()}
    return _without_nulls(value)
