"""What clients give as a prompt, as Prompts for the mesh."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.gateway.job import Prompt
from services.gateway.json_body import encode
from services.gateway.schema import ChatMessage, Part
from services.gateway.unsupported import unsupported
from services.gateway.violations import show
from shared.codec import Array
from shared.errors import InvalidRequest


def chat_prompt(fields: list[dict[str, Any]], messages: list[ChatMessage]) -> Prompt:
    """``fields`` are the messages as the client sent them."""
    plain = [_with_text(fields[index], message, index) for index, message in enumerate(messages)]
    return Prompt("chat", _bytes(encode(plain)))


def text_prompts(prompt: str | list[Any], vocab_size: int, max_prompts: int) -> list[Prompt]:
    """Of a text, a list of ids, or a list of several of either kind."""
    if isinstance(prompt, str):
        return [text_prompt(prompt)]
    _check_kinds(prompt)
    first = prompt[0]
    if isinstance(first, int):
        return [ids_prompt(prompt, vocab_size, "prompt")]
    if len(prompt) > max_prompts:
        raise InvalidRequest(
            f"prompt has {len(prompt)} prompts; the limit is max-choices = {max_prompts}",
            param="prompt",
        )
    if isinstance(first, str):
        return [text_prompt(text) for text in prompt]
    return [ids_prompt(ids, vocab_size, f"prompt[{index}]") for index, ids in enumerate(prompt)]


def text_prompt(text: str) -> Prompt:
    return Prompt("text", _bytes(text.encode()))


def ids_prompt(ids: Sequence[int], vocab_size: int, param: str) -> Prompt:
    """``param`` is where they come from."""
    return Prompt("ids", known_ids(ids, vocab_size, param))


def known_ids(ids: Sequence[int], vocab_size: int, param: str) -> Array:
    """[n] int32. Raises InvalidRequest for an id that the model does not have."""
    array = np.array(ids, dtype=np.int32)
    outside = np.flatnonzero(array >= vocab_size)
    if outside.size:
        param, value = f"{param}[{outside[0]}]", ids[outside[0]]
        raise InvalidRequest(f"{param} is {value}; token ids are below {vocab_size}", param=param)
    return array


def _check_kinds(prompt: list[Any]) -> None:
    if len(set(map(type, prompt))) == 1:
        return
    index = next(i for i, item in enumerate(prompt) if type(item) is not type(prompt[0]))
    param = f"prompt[{index}]"
    raise InvalidRequest(
        f"{param} is {show(prompt[index])} and prompt[0] is {show(prompt[0])}; expected one kind",
        param=param,
    )


def _with_text(fields: dict[str, Any], message: ChatMessage, index: int) -> dict[str, Any]:
    """The message as the client sent it, its content in one string."""
    param = f"messages[{index}].content"
    if message.content is None and not fields.get("tool_calls"):
        raise InvalidRequest(f"{param} is required", param=param)
    if not isinstance(message.content, list):
        return fields
    texts = [_text(part, f"{param}[{number}]") for number, part in enumerate(message.content)]
    return {**fields, "content": "".join(texts)}


def _text(part: Part, param: str) -> str:
    if part.type != "text":
        raise unsupported(f"{param}.type", part.type, show("text"))
    if part.text is None:
        raise InvalidRequest(f"{param}.text is required", param=f"{param}.text")
    return part.text


def _bytes(text: bytes) -> Array:
    return np.frombuffer(text, dtype=np.uint8)
