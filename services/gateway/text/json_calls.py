"""Calls as objects of JSON with a name and arguments, one by one or in an array."""

from services.gateway.text.context import Context
from services.gateway.text.source import Broken, Waiting

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_OTHER = ("type", "id", "index")  # keys that stand before the name in what is a call


def read_json_calls(context: Context, is_tagless: bool) -> Waiting[None]:
    """``is_tagless``: no marker came, so a call is only what names a function that there is."""
    source = context.source
    if (yield from source.next_char()) != "[":
        yield from _JsonCall(context, is_tagless).read()
        return
    source.take(1)
    while True:
        yield from source.skip_blanks()
        yield from _JsonCall(context, is_tagless).read()
        yield from source.skip_blanks()
        char = yield from source.next_char()
        if char not in (",", "]"):
            raise Broken
        source.take(1)
        if char == "]":
            return
        source.record()


class _JsonCall:
    def __init__(self, context: Context, is_tagless: bool) -> None:
        self._context = context
        self._source = context.source
        self._is_tagless = is_tagless
        self._has_name = False
        self._has_arguments = False
        self._held: list[str] = []  # arguments that came before the name

    def read(self) -> Waiting[None]:
        yield from self._expect("{")
        yield from self._source.skip_blanks()
        while (yield from self._source.next_char()) != "}":
            yield from self._read_member()
            yield from self._source.skip_blanks()
            if (yield from self._source.next_char()) == ",":
                self._source.take(1)
                yield from self._source.skip_blanks()
        if not self._has_name:
            raise Broken
        self._source.take(1)
        self._context.out.end_call()

    def _expect(self, char: str) -> Waiting[None]:
        if (yield from self._source.next_char()) != char:
            raise Broken
        self._source.take(1)

    def _read_member(self) -> Waiting[None]:
        json = self._context.json
        key = yield from json.read_string()
        yield from self._source.skip_blanks()
        yield from self._expect(":")
        yield from self._source.skip_blanks()
        if key in _NAMES and not self._has_name:
            self._start((yield from json.read_string()))
        elif key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            sink = self._context.out.arguments if self._has_name else self._held.append
            yield from json.copy_arguments(sink)
        elif self._is_tagless and not self._has_name and key not in _OTHER:
            raise Broken
        else:
            yield from json.copy(lambda _: None)

    def _start(self, name: str) -> None:
        self._context.start_call(name, is_known=self._is_tagless)
        self._has_name = True
        for text in self._held:
            self._context.out.arguments(text)
