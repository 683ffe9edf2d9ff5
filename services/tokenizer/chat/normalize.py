"""Messages as clients send them to messages as chat templates read them. Pure."""

import json
import logging
from collections.abc import Iterator
from typing import Any

from services.tokenizer.chat.template_traits import TemplateTraits
from shared.errors import InvalidRequest
from shared.text.json_scan import TooManyValues, num_values
from shared.text.long_json import MAX_VALUES
from shared.text.surrogates import without_escaped_halves

log = logging.getLogger(__name__)

Message = dict[str, Any]
MEDIA = "image", "video"  # the types of parts


def normalize(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """New messages; the client's messages stay unchanged. Raises InvalidRequest naming the field
    of a message that no template can read."""
    if not traits.joins_arguments:
        _check_arguments(messages)
    return [
        _normalized(message, traits, f"messages[{index}]")
        for index, message in enumerate(_with_tools(messages))
    ]


def _check_arguments(messages: list[Message]) -> None:
    """Parses arguments given as texts as JSON, in one call that holds the GIL. Raises
    InvalidRequest."""
    texts = list(_argument_texts(messages))
    if sum(map(len, texts)) <= MAX_VALUES:
        return
    num_left = MAX_VALUES
    try:
        for text in texts:
            num_left -= num_values(memoryview(text.encode(errors="replace")), num_left)
    except TooManyValues:
        raise InvalidRequest(
            f"messages have calls whose arguments have more than {MAX_VALUES} names and values; the"
            f" limit is {MAX_VALUES}",
            param="messages",
        ) from None


def _argument_texts(messages: list[Message]) -> Iterator[str]:
    for message in messages:
        calls = message.get("tool_calls")
        functions = (
            [call.get("function") for call in calls if isinstance(call, dict)]
            if isinstance(calls, list)
            else []
        )
        for function in (*functions, message.get("function_call")):
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                yield arguments


def _with_tools(messages: list[Message]) -> Iterator[Message]:
    """OpenAI's deprecated calls of functions as calls of tools, the only ones that templates know.
    A result belongs to the last call."""
    call_id = _call_id(0)
    for index, message in enumerate(messages):
        function, calls = message.get("function_call"), message.get("tool_calls")
        if isinstance(calls, list) and calls:  # our own replies have both forms
            last = calls[-1]
            call_id = last.get("id", call_id) if isinstance(last, dict) else call_id
        elif function is not None:
            if not isinstance(function, dict):
                param = f"messages[{index}].function_call"
                raise InvalidRequest(f"{param} is {_kind(function)}; expected object", param=param)
            call_id = _call_id(index)
            call = {"id": call_id, "type": "function", "function": function}
            message = {**message, "tool_calls": [call]}
        elif message.get("role") == "function":
            message = {**message, "role": "tool", "tool_call_id": call_id}
        yield {key: value for key, value in message.items() if key != "function_call"}


def _call_id(index: int) -> str:
    """Nine letters and digits, as the templates of Mistral's models require."""
    return f"call{index:05d}"


def _normalized(message: Message, traits: TemplateTraits, param: str) -> Message:
    # Templates test for the presence of a field, not for null.
    found = {key: value for key, value in message.items() if value is not None}
    if found.get("role") == "developer" and not traits.knows_developer:
        found["role"] = "system"
    if calls := found.pop("tool_calls", None):
        found["tool_calls"] = _calls(calls, traits, f"{param}.tool_calls")
    found["content"] = _content(found, traits, f"{param}.content")
    reasoning = found.get("reasoning_content", found.get("reasoning"))
    if reasoning is not None:
        found["reasoning"] = found["reasoning_content"] = reasoning
    return found


def _content(message: Message, traits: TemplateTraits, param: str) -> Any:
    """The content as the template wants it: no content is an empty text, or null next to calls."""
    content = message.get("content") or message.get("refusal") or message.get("content", "")
    if not content and traits.wants_null and "tool_calls" in message:
        return None
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if traits.takes_parts_alone else content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{param} is {_kind(content)}; expected str, array or null", param=param
        )
    parts = [_part(part, traits, f"{param}[{number}]") for number, part in enumerate(content)]
    if any(part["type"] in MEDIA for part in parts):
        return parts
    if not traits.takes_parts or (message.get("role") == "tool" and not traits.takes_parts_alone):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, traits: TemplateTraits, param: str) -> Message:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{param} is {_kind(part)}; expected object", param=param)
    if part.get("type") not in MEDIA:
        text = _text_of(part, param)
        return {"type": "text", "text": text} if part["type"] == "refusal" else dict(part)
    if not traits.takes_parts:
        raise InvalidRequest(f"{param}: the chat template takes no images", param=param)
    return {"type": part["type"]}


def _text_of(part: Message, param: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        field = f"{param}.type"
        raise InvalidRequest(f'{field} is {json.dumps(kind)}; expected "text"', param=field)
    text = part.get(kind)
    if not isinstance(text, str):
        field = f"{param}.{kind}"
        raise InvalidRequest(f"{field} is {_kind(text)}; expected str", param=field)
    return text


def _calls(calls: Any, traits: TemplateTraits, param: str) -> list[Any]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{param} is {_kind(calls)}; expected array", param=param)
    return [_call(call, traits, f"{param}[{number}]") for number, call in enumerate(calls)]


def _call(call: Any, traits: TemplateTraits, param: str) -> Message:
    """The call with its arguments as a dict, or as JSON if the template joins them."""
    function = _function_of(call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{param}.function is required", param=f"{param}.function")
    arguments = function.get("arguments")
    if traits.joins_arguments:
        is_text = isinstance(arguments, str)
        arguments = arguments if is_text else json.dumps(arguments or {}, ensure_ascii=False)
    else:
        arguments = _parsed(arguments, f"{param}.function.arguments")
    others = {key: value for key, value in call.items() if key not in ("type", "custom")}
    return {"type": "function", **others, "function": {**function, "arguments": arguments}}


def _function_of(call: Message) -> Any:
    """A custom tool is a function of one argument, as it is in a response's items."""
    custom = call.get("custom")
    if isinstance(custom, dict):
        return {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    return call.get("function")


def _parsed(arguments: Any, param: str) -> Message:
    """A model may have written anything; its conversation goes on."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = (
                json.loads(without_escaped_halves(arguments.encode())) if arguments.strip() else {}
            )
        except (ValueError, RecursionError):
            value = None
    if isinstance(value, dict):
        return value
    if arguments is not None:
        log.info("%s is no JSON object; the chat template gets {}", param)
    return {}


def _kind(value: Any) -> str:
    """The word of JSON for a value's type."""
    names = {dict: "object", list: "array", bool: "bool", type(None): "null"}
    return names.get(type(value), type(value).__name__)
