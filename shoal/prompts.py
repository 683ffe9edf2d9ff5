"""Prompts in the forms that vLLM accepts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

TokenIds = list[int]
GivenPrompt = str | TokenIds | dict[str, Any]
GivenPrompts = GivenPrompt | Sequence[GivenPrompt]
Messages = list[dict[str, Any]]

KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class Prompt(NamedTuple):
    """``text`` is None for a prompt of ids without one; ids have precedence."""

    text: str | None
    token_ids: TokenIds | None = None
    cache_salt: str | None = None

    @property
    def value(self) -> str | TokenIds:
        return self.token_ids if self.token_ids is not None else self.text or ""

    def body(self, name: str) -> dict[str, Any]:
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {name: self.value, **salt}


def read_prompts(given: GivenPrompts) -> list[Prompt]:
    """One prompt, or a list. Raises TypeError."""
    if isinstance(given, str | dict) or _are_ids(given):
        return [_read(given, "prompts")]
    return [_read(each, f"prompts[{index}]") for index, each in enumerate(given)]


def _read(given: Any, where: str) -> Prompt:
    if isinstance(given, str):
        return Prompt(given)
    if _are_ids(given):
        return Prompt(None, list(given))
    if not isinstance(given, dict):
        raise TypeError(f"{where}: expected a text, token ids or a dict, not {type_name(given)}")
    for name, value in given.items():
        if name not in KEYS and value is not None:
            raise TypeError(f"{where}: {name} is not supported; the keys are {', '.join(KEYS)}")
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if not (isinstance(text, str) if ids is None else _are_ids(ids)):
        raise TypeError(f"{where}: needs prompt, a text, or prompt_token_ids, a list of ids")
    return Prompt(text, None if ids is None else list(ids), given.get("cache_salt"))


def read_conversations(given: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation, or a list. Raises TypeError."""
    if not isinstance(given, list | tuple):
        raise TypeError(f"messages: expected a list of messages, not {type_name(given)}")
    conversations = [given] if given and isinstance(given[0], dict) else given
    for index, messages in enumerate(conversations):
        if not isinstance(messages, list | tuple):
            raise TypeError(
                f"messages[{index}]: expected a list of messages, not {type_name(messages)}"
            )
    return [list(messages) for messages in conversations]  # type: ignore[arg-type]


def _are_ids(given: Any) -> bool:
    is_list = isinstance(given, list | tuple) and len(given) > 0
    return is_list and all(type(each) is int for each in given)


def type_name(value: object) -> str:
    return type(value).__name__


def one_each(values: Any, num: int, name: str) -> list[Any]:
    """``values``, one for all or one for each of ``num`` prompts. Raises ValueError."""
    if not isinstance(values, list | tuple):
        return [values] * num
    if len(values) != num:
        raise ValueError(f"{name}: {len(values)} for {num} prompts; expected one, or one for each")
    return list(values)
