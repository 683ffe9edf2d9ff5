"""Where the added tokens of a text are: Marks, each beside the text that it belongs to. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence

from shared.wire.messages import Mark


class Marks:
    """The Marks of one text, which wait until the text in front of them is out.

    ``added`` has the text of each added token, empty if it is not shown.
    """

    def __init__(self, added: Mapping[int, str]) -> None:
        self._added = added
        self._num_decoded = 0
        self._waiting: deque[Mark] = deque()

    def note(self, new: str, index: int, ids: Sequence[int]) -> None:
        """``ids``, from token ``index`` on, made the text ``new`` certain. An added token comes
        alone, and ``new`` ends with its text."""
        self.note_text(new)
        shown = self._added.get(ids[0])
        if shown is not None:
            num_chars = len(shown) if new.endswith(shown) else len(new)
            self._waiting.append(Mark(self._num_decoded - num_chars, num_chars, index, ids[0]))

    def note_text(self, new: str) -> None:
        """``new`` became certain without a token."""
        self._num_decoded += len(new)

    def note_textless(self, index: int, token_id: int) -> None:
        """Token ``index`` ends the text and has none, whatever it is."""
        if token_id in self._added:
            self._waiting.append(Mark(self._num_decoded, 0, index, token_id))

    def take(self, num_out: int) -> list[Mark]:
        """Those that can go out with the first ``num_out`` characters of the text."""
        taken = []
        while self._waiting and _can_go(self._waiting[0], num_out):
            taken.append(self._waiting.popleft())
        return taken


def _can_go(mark: Mark, num_out: int) -> bool:
    """A shown token's mark waits for its first character: a stop string may still cut it off."""
    return mark.position < num_out or (mark.position == num_out and mark.num_chars == 0)
