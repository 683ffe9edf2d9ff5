"""The options of a request for its chat template, apart from the messages."""

from collections.abc import Container, Mapping
from typing import Any, TypeVar

import msgspec

from shared.errors import ConfigError, InvalidRequest
from shared.wire.messages import ChatOptions

# Names that we pass to a template, or that have a meaning for other template renderers.
OURS = {
    *("chat_template", "tokenize", "messages", "tools", "documents"),
    *("add_generation_prompt", "continue_final_message"),
}

Objects = list[dict[str, Any]]
T = TypeVar("T")


def read_options(options: ChatOptions, special_tokens: Container[str]) -> dict[str, Any]:
    """The variables of a template except messages and special tokens. Raises InvalidRequest naming
    the client's field."""
    if options.adds_generation_prompt and options.continues_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are both true; expected one of them",
            param="continue_final_message",
        )
    kwargs = _read(options.template_kwargs, dict[str, Any], "chat_template_kwargs", "an object")
    for name in kwargs or ():
        if name in OURS or name in special_tokens:
            field = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{field} is set by Shoal, or a field of its own", param=field)
    return {
        **(kwargs or {}),
        "tools": _read(options.tools, Objects, "tools", "an array of objects") or None,
        "documents": _read(options.documents, Objects, "documents", "an array of objects"),
        "add_generation_prompt": options.adds_generation_prompt,
    }


def check_defaults(
    defaults: Mapping[str, Any], special_tokens: Container[str]
) -> Mapping[str, Any]:
    """Returns ``defaults``. Raises ConfigError for a name that is not free."""
    for name in defaults:
        if name in OURS or name in special_tokens:
            raise ConfigError(f"default-chat-template-kwargs: {name} is set by Shoal")
    return defaults


def num_chars(options: ChatOptions | None) -> int:
    """The approximate number of characters that a prompt may have from the options."""
    if options is None:
        return 0
    return len(options.tools) + len(options.documents) + len(options.template_kwargs)


def _read(text: str, kind: type[T], param: str, expected: str) -> T | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not {expected}: {error}", param=param) from None
