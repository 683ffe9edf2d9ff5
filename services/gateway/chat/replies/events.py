"""Events of a choice's text: content, reasoning and calls, piece by piece."""

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """Call number ``index`` of the choice begins; its arguments follow."""

    index: int
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the JSON of the arguments of call ``index``; never empty."""

    index: int
    text: str


Event = Reasoning | Content | CallStart | Arguments
