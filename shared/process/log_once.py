"""Remembers logged texts, so that a peer cannot fill the log by repetition."""

MAX_KNOWN = 1000


class LogOnce:
    """Recognises new texts; forgets the oldest above ``MAX_KNOWN``."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    def is_new(self, text: str) -> bool:
        if text in self._known:
            return False
        self._known[text] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return True
