"""Ids to text: the delivery of one Tokens message to open requests."""

from msgspec.structs import replace

from services.tokenizer.metrics import DECODED_TOKENS
from services.tokenizer.open_choice import OpenChoice
from services.tokenizer.outbox import Outbox
from services.tokenizer.request_table import Key, OpenRequest, RequestTable
from shared.errors import CodecError
from shared.wire.messages import REPETITION_DETECTED, Finished, RunKind, TokenRow, Tokens
from shared.wire.token_arrays import Layout, TokenArrays

Found = tuple[OpenRequest, OpenChoice]


def deliver(tokens: Tokens, arrays: TokenArrays, open_requests: RequestTable) -> list[OpenRequest]:
    """Sends one Deltas to each gateway concerned; returns the requests that have ended. Raises
    CodecError for a message that no scheduler of ours sends, before any part of it goes out.

    A stop string found here ends a choice that still runs, so the choice is cancelled. Rows of
    requests or choices that are not open (any more) are skipped.
    """
    layout = Layout(tokens.rows, arrays)
    stopping = {(each.request, each.attempt) for each in tokens.finished if each.reason == "stop"}
    found = _find(tokens, stopping, open_requests)
    outbox = Outbox(layout)
    delivery = _Delivery(open_requests, outbox, stopping)
    delivery.push_all(tokens.rows, found, arrays.ids.tolist())
    for finished in tokens.finished:
        delivery.finish(finished)
    for report in tokens.spans:
        open_requests.observer.forward(report)
    for gateway, report in open_requests.observer.take_reports():
        outbox.add_spans(gateway, report)
    outbox.send()
    DECODED_TOKENS.inc(delivery.num_tokens)
    return delivery.ended


def _find(tokens: Tokens, stopping: set[Key], open_requests: RequestTable) -> list[Found | None]:
    """The request and the choice of each row that are open. Raises CodecError unless every row
    continues its choice, drafts come before the tokens they are for, and a stopped choice has a
    token to stop at."""
    all_found: list[Found | None] = []
    next_positions: dict[tuple[str, int, bool], int] = {}
    with_drafts: set[Key] = set()
    for row in tokens.rows:
        found = open_requests.by_sequence(row.request, row.attempt)
        all_found.append(found)
        if found is None:
            continue
        of_prompt = row.run.kind == RunKind.PROMPT
        sequence, place = (row.request, row.attempt), (row.request, row.attempt, of_prompt)
        start = found[1].num_prompt_scored if of_prompt else found[1].num_tokens
        start = next_positions.get(place, start)
        if row.position != start:
            owner = " of the prompt" if of_prompt else ""
            raise CodecError(
                f"{row.request}: token {row.position}{owner} came where {start} belongs"
            )
        if row.run.kind == RunKind.DRAFTS:
            with_drafts.add(sequence)
            continue
        next_positions[place] = start + row.run.num_tokens
        if not of_prompt:
            with_drafts.discard(sequence)
            if sequence in stopping and not row.run.num_tokens:
                raise CodecError(f"{row.request}: it stops without a token")
    if with_drafts:
        names = ", ".join(name for name, _ in with_drafts)
        raise CodecError(f"drafts came without the tokens they are for: {names}")
    return all_found


class _Delivery:
    def __init__(self, open_requests: RequestTable, outbox: Outbox, stopping: set[Key]) -> None:
        self._open = open_requests
        self._outbox = outbox
        self._stopping = stopping
        self._stop_ids: dict[Key, int] = {}
        self._last_rows: dict[Key, int] = {}  # of several, only the last one ends
        self._drafts: dict[Key, tuple[int, TokenRow]] = {}  # their tokens are to come
        self.ended: list[OpenRequest] = []
        self.num_tokens = 0

    def push_all(self, rows: list[TokenRow], found: list[Found | None], ids: list[int]) -> None:
        start = 0
        self._last_rows = {
            (row.request, row.attempt): index
            for index, row in enumerate(rows)
            if row.run.kind == RunKind.OUTPUT
        }
        for index, (row, each) in enumerate(zip(rows, found, strict=True)):
            if each is not None:
                self._push(*each, index, row, ids[start : start + row.run.num_tokens])
            start += row.run.num_tokens

    def _push(
        self, request: OpenRequest, choice: OpenChoice, index: int, row: TokenRow, ids: list[int]
    ) -> None:
        if choice.index not in request.choices:  # a stop string has just ended it
            return
        choice.num_cached = row.num_cached
        request.observer.note_tokens()
        match row.run.kind:
            case RunKind.PROMPT:
                choice.num_prompt_scored += row.run.num_tokens
                self._outbox.add_row(request, choice, index, row)
            case RunKind.POOLED:
                self._outbox.add_row(request, choice, index, row)
            case RunKind.DRAFTS:
                self._drafts[row.request, row.attempt] = index, row
            case RunKind.OUTPUT:
                self._push_tokens(request, choice, index, row, ids)

    def _push_tokens(
        self, request: OpenRequest, choice: OpenChoice, index: int, row: TokenRow, ids: list[int]
    ) -> None:
        sequence = row.request, row.attempt
        ends_text = sequence in self._stopping and self._last_rows[sequence] == index
        if ends_text and ids[-1] in request.submit.params.stop_token_ids:
            self._stop_ids[row.request, row.attempt] = ids[-1]
        text = choice.push(
            ids, last_is_textless=ends_text and not request.submit.text.includes_stop
        )
        row = _first_tokens(row, choice.num_tokens - row.position)
        self.num_tokens += row.run.num_tokens
        self._add_drafts(request, choice, row)
        self._outbox.add_row(request, choice, index, row, text, choice.take_marks())
        if choice.stop is not None:
            request.cancel_choice(choice.index)
            self._outbox.add_end(request, choice, "", "stop", choice.stop)
            self._close(request, choice)

    def _add_drafts(self, request: OpenRequest, choice: OpenChoice, row: TokenRow) -> None:
        """Adds the drafts for the tokens of ``row``: drafts that a stop string cut off count as
        rejected."""
        held = self._drafts.pop((row.request, row.attempt), None)
        if held is not None:
            index, drafts = held
            run = replace(drafts.run, num_accepted=row.run.num_accepted)
            self._outbox.add_row(request, choice, index, replace(drafts, run=run))

    def finish(self, finished: Finished) -> None:
        found = self._open.by_sequence(finished.request, finished.attempt)
        if found is None:
            return
        request, choice = found
        text = choice.finish()
        reason = finished.reason
        stop_reason: int | str | None = self._stop_ids.get((finished.request, finished.attempt))
        if choice.stop is not None:
            reason, stop_reason = "stop", choice.stop
        elif reason == "repetition":
            stop_reason = REPETITION_DETECTED
        self._outbox.add_end(request, choice, text, reason, stop_reason)
        self._close(request, choice)

    def _close(self, request: OpenRequest, choice: OpenChoice) -> None:
        del request.choices[choice.index]
        if not request.choices:
            self._open.pop(request, "finished")
            self.ended.append(request)


def _first_tokens(row: TokenRow, num: int) -> TokenRow:
    run = row.run
    if num == run.num_tokens:
        return row
    return replace(row, run=replace(run, num_tokens=num, num_accepted=min(run.num_accepted, num)))
