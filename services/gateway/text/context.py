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
    """``stops`` are the markers around calls: in a call they occur only inside a string."""

    source: TextSource
    out: Collector
    functions: Mapping[str, Any]
    json: JsonText
    stops: Markers
    table: MarkerTable

    def markers(self, *texts: str) -> Markers:
        return self.table.of(*texts)

    def start_call(self, name: str, is_known: bool = False, call_id: str | None = None) -> None:
        """The rest of the text is a call; ``is_known``: only of an existing function."""
        if not name or (is_known and name not in self.functions):
            raise Broken
        self.out.start_call(name, call_id)
        self.source.recorded()

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
