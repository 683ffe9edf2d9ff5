"""What one Tokens sends up: a single Deltas for each gateway."""

from services.tokenizer.open_choice import OpenChoice
from services.tokenizer.request_table import OpenRequest
from shared.messages import Delta, Deltas, Finished, FinishReason, TokenRow
from shared.peer import Peer
from shared.token_arrays import Layout, Selection


class _Letter:
    def __init__(self, layout: Layout) -> None:
        self.deltas = Deltas([], [])
        self.selection = Selection(layout)


class Outbox:
    """``layout`` is that of the Tokens that came in."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._letters: dict[Peer, _Letter] = {}

    def add_row(
        self, request: OpenRequest, choice: OpenChoice, index: int, row: TokenRow, text: str = ""
    ) -> None:
        """``row``, which is row ``index`` or the beginning of it, with the text that goes out."""
        letter = self._letter(request)
        delta = Delta(
            request.request, request.attempt, choice.index, row.position, row.num_tokens, text,
            row.num_values, row.num_top_ids,
            row.of_prompt, row.of_drafts, row.num_drafts, row.num_accepted, row.num_cached,
        )  # fmt: skip
        letter.deltas.rows.append(delta)
        letter.selection.add(index, row.num_tokens)

    def add_end(
        self,
        request: OpenRequest,
        choice: OpenChoice,
        text: str,
        reason: FinishReason,
        stop_reason: int | str | None = None,
    ) -> None:
        """The end of a choice, with the text that had been held back."""
        name = (request.request, request.attempt, choice.index)
        deltas = self._letter(request).deltas
        if text:
            deltas.rows.append(Delta(*name, choice.num_tokens, 0, text))
        finished = Finished(*name, reason, choice.num_tokens, stop_reason, choice.num_cached)
        deltas.finished.append(finished)

    def add_unbegun(self, request: OpenRequest, reason: FinishReason) -> None:
        """The end of all choices of a request that is not encoded yet."""
        self._letter(request).deltas.finished.extend(
            Finished(request.request, request.attempt, start.choice, reason, start.num_ids)
            for start in request.submit.choices
        )

    def send(self) -> None:
        for gateway, letter in self._letters.items():
            gateway.send(letter.deltas, *letter.selection.arrays())

    def _letter(self, request: OpenRequest) -> _Letter:
        letter = self._letters.get(request.gateway)
        if letter is None:
            letter = self._letters[request.gateway] = _Letter(self._layout)
        return letter
