"""Converts messages for peers below minor ``OPTIONS_MINOR``, with one field per option.

The next protocol major drops these fields and this module.
"""

from typing import TypeVar

from msgspec.structs import replace

from shared.wire.envelope import RequestOptions, read_options, write_options
from shared.wire.messages import Admit, Generate, Message, StepPlan, Submit

OLD = "old_"

Part = TypeVar("Part", bound=Submit | Generate | Admit)


def for_older(message: Message) -> Message:
    """The message with the fields of an older peer."""
    match message:
        case Submit() | Generate():
            return replace(message, **_old_values(message))
        case StepPlan(admit=rows) if rows:
            return replace(message, admit=[_admit_for_older(row) for row in rows])
        case _:
            return message


def from_older(message: Message) -> Message:
    """The message of an older peer with its options in one row."""
    match message:
        case Submit() | Generate():
            return _with_options(message)
        case StepPlan(admit=rows) if rows:
            return replace(message, admit=[_with_options(row) for row in rows])
        case _:
            return message


def _old_values(part: Submit | Generate) -> dict[str, object]:
    options = read_options(part.options)
    return {OLD + name: getattr(options, name) for name in _names(part)}


def _admit_for_older(row: Admit) -> Admit:
    return replace(row, old_is_traced=read_options(row.options).traces(row.choice))


def _with_options(part: Part) -> Part:
    options = RequestOptions(**{name: getattr(part, OLD + name) for name in _names(part)})
    return replace(part, options=write_options(options))


def _names(part: Submit | Generate | Admit) -> list[str]:
    """The options with a field of their own in ``part``."""
    fields = part.__struct_fields__
    return [name.removeprefix(OLD) for name in fields if name.startswith(OLD)]
