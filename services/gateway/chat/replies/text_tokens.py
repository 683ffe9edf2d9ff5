"""Which tokens of a choice have written which part of its text."""

from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.mesh.token_table import TokenTable


class TextTokens:
    """Counts by the bytes of the tokens, and not by what came together: how many come at once is
    a matter of drafts and of the load."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._ids: list[int] = []
        self._hidden: set[int] = set()  # indices of tokens that have no text
        self._texts: list[str] = []

    def add(self, update: ChoiceUpdate) -> None:
        self._ids += update.arrays.ids.tolist()
        self._hidden.update(mark.index for mark in update.marks if not mark.num_chars)
        self._texts.append(update.text)

    def num_before(self, num_chars: int) -> int:
        """How many tokens have written the first ``num_chars`` of the text, the last one maybe more
        than that."""
        text = "".join(self._texts)
        num_bytes = len(text[:num_chars].encode())
        is_first = True
        for index, token_id in enumerate(self._ids):
            if num_bytes <= 0:
                return index
            if index not in self._hidden:
                written = self._table.written(token_id)
                num_bytes -= len(written)
                if is_first and written.startswith(b" ") and not text.startswith(" "):
                    num_bytes += 1  # some decoders strip the blank that a text begins with
                is_first = False
        return len(self._ids)
