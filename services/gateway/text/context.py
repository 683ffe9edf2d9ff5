"""The context shared by the parsers of calls."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.text.collector import Collector
from services.gateway.text.json_text import JsonText
from services.gateway.text.source import Broken, Markers, MarkerTable, TextSource, Waiting

_NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True, slots=True)
class CallContext:
    """``stops`` are the markers around calls: in a call they occur only inside a string. If it
    ``doubles_names``, a model writes a function without a namespace as its own."""

    source: TextSource
    out: Collector
    functions: Mapping[str, Any]
    json: JsonText
    stops: Markers
    table: MarkerTable
    doubles_names: bool = False

    def markers(self, *texts: str) -> Markers:
        return self.table.of(*texts)

    def start_call(self, name: str, is_known: bool = False, call_id: str | None = None) -> None:
        """The rest of the text is a call; ``is_known``: only of an existing function."""
        if self.doubles_names:
            name = self._undoubled(name)
        if not name or (is_known and name not in self.functions):
            raise Broken
        self.out.start_call(name, call_id)
        self.source.recorded()

    def _undoubled(self, name: str) -> str:
        namespace, _, rest = name.partition(".")
        is_doubled = namespace == rest and namespace in self.functions
        return namespace if is_doubled and name not in self.functions else name

    def try_call(self, reading: Waiting[None]) -> Waiting[bool]:
        """Returns True if ``reading`` begins a call. A part without a call is content, unchanged
        from the start of its recording, unless the text ends inside a call."""
        num_before = self.out.num_calls
        try:
            yield from reading
        except Broken:
            has_begun = self.out.num_calls > num_before
            is_cut = has_begun and not (yield from self.source.ready())
            text = self.source.recorded()
            if has_begun and not is_cut:
                self.out.end_call()
            self.out.content("" if is_cut else text)
        return self.out.num_calls > num_before

    def read_name(self) -> Waiting[str]:
        """The name of a function, without the blanks around it."""
        yield from self.source.skip_blanks()
        pieces: list[str] = []
        while (yield from self.source.next_char()):
            text = self.source.take_match(_NAME)
            if not text:
                break
            pieces.append(text)
        yield from self.source.skip_blanks()
        return "".join(pieces)
