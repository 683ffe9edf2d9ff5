"""Stop strings: found wherever they straddle pieces of text. Pure."""


class StopMatcher:
    """Passes text through until one of ``stops`` appears; ``includes_stop`` lets it through too.

    A tail that may be the beginning of a stop string is held back until the next piece decides.
    The match that ends first wins; of two that end together, the longer. No match ends in a mute
    piece, but one may begin there.
    """

    def __init__(self, stops: list[str], includes_stop: bool = False) -> None:
        self._stops = stops
        self._includes_stop = includes_stop
        self._max_len = max(map(len, stops), default=0)
        self._held = ""
        self._num_exempt = 0  # characters of what is held
        self.match: str | None = None

    def push(self, text: str, is_exempt: bool = False) -> str:
        """The part of the text so far that can go out now; sets ``match`` to a stop string."""
        if not self._stops:
            return text
        text = self._held + text
        if is_exempt:
            self._num_exempt = len(text)
        found = self._first_match(text)
        if found is not None:
            (start, end), self._held = found, ""
            self.match = text[start:end]
            return text[: end if self._includes_stop else start]
        keep = self._num_to_hold(text)
        self._held = text[len(text) - keep :]
        self._num_exempt = max(0, self._num_exempt - (len(text) - keep))
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """The position of the stop string that ends first."""
        num = self._num_exempt
        matches = [(text.find(stop, max(0, num - len(stop) + 1)), stop) for stop in self._stops]
        found = [(start + len(stop), start) for start, stop in matches if start >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest tail of ``text`` that begins a stop string."""
        for length in range(min(self._max_len - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
