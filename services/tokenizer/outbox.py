"""The output of one Tokens message: a single Deltas for each gateway."""

from collections.abc import Sequence

from services.tokenizer.open_choice import OpenChoice
from services.tokenizer.request_table import OpenRequest
from shared.link.peer import Peer
from shared.wire.messages import (
    NO_TOKENS,
    Delta,
    Deltas,
    Finished,
    FinishReason,
    Mark,
    SpanReport,
    TokenRow,
)
from shared.wire.spans import SpanBuffer
from shared.wire.token_arrays import Layout, Selection


class _Outgoing:
    def __init__(self, layout: Layout) -> None:
        self.deltas = Deltas([], [])
        self.spans = SpanBuffer()
        self.selection = Selection(layout)


class Outbox:
    """``layout`` is that of the Tokens that came in."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._outgoing: dict[Peer, _Outgoing] = {}

    def add_row(
        self,
        request: OpenRequest,
        choice: OpenChoice,
        index: int,
        row: TokenRow,
        text: str = "",
        marks: Sequence[Mark] = (),
    ) -> None:
        """Adds ``row``, which is row ``index`` or the beginning of it, with the text and the marks
        that go out."""
        outgoing = self._outgoing_for(request.gateway)
        delta = Delta(
            request=request.request,
            attempt=request.attempt,
            choice=choice.index,
            position=row.position,
            run=row.run,
            text=text,
            num_cached=row.num_cached,
            marks=list(marks),
        )
        outgoing.deltas.rows.append(delta)
        outgoing.selection.add(index, row.run.num_tokens)

    def add_end(
        self,
        request: OpenRequest,
        choice: OpenChoice,
        text: str,
        reason: FinishReason,
        stop_reason: int | str | None = None,
    ) -> None:
        """The end of a choice, with the text and the marks that had been held back."""
        name = (request.request, request.attempt, choice.index)
        deltas = self._outgoing_for(request.gateway).deltas
        marks = choice.take_marks()
        if text or marks:
            position = choice.num_tokens
            deltas.rows.append(Delta(*name, position, NO_TOKENS, text, marks=marks))
        finished = Finished(*name, reason, choice.num_tokens, stop_reason, choice.num_cached)
        deltas.finished.append(finished)

    def add_unbegun(self, request: OpenRequest, reason: FinishReason) -> None:
        """The end of all choices of a request that is not encoded yet."""
        self._outgoing_for(request.gateway).deltas.finished.extend(
            Finished(request.request, request.attempt, start.choice, reason, start.num_ids)
            for start in request.submit.choices
        )

    def add_spans(self, gateway: Peer, report: SpanReport) -> None:
        self._outgoing_for(gateway).spans.add(report)

    def send(self) -> None:
        for gateway, outgoing in self._outgoing.items():
            outgoing.deltas.spans.extend(outgoing.spans.take())
            gateway.send(outgoing.deltas, *outgoing.selection.arrays())

    def _outgoing_for(self, gateway: Peer) -> _Outgoing:
        outgoing = self._outgoing.get(gateway)
        if outgoing is None:
            outgoing = self._outgoing[gateway] = _Outgoing(self._layout)
        return outgoing
