"""Ids up to text: what one Tokens brings to open requests."""

from services.tokenizer.choice import Choice
from services.tokenizer.metrics import DECODED_TOKENS
from services.tokenizer.open_requests import OpenRequest, OpenRequests
from services.tokenizer.outbox import Outbox
from shared.messages import Finished, TokenRow, Tokens
from shared.token_arrays import Layout, TokenArrays


def deliver(tokens: Tokens, arrays: TokenArrays, open_requests: OpenRequests) -> list[OpenRequest]:
    """Sends one Deltas to each gateway concerned; returns the requests that have ended.

    A stop string found here ends a choice that still runs, so it is cancelled. Rows of what is not
    open (any more) are passed over.
    """
    layout = Layout(tokens.rows, arrays)
    outbox = Outbox(layout)
    delivery = _Delivery(open_requests, outbox, tokens.finished)
    ids = arrays.ids.tolist()
    start = 0
    for index, row in enumerate(tokens.rows):
        delivery.push(index, row, ids[start : start + row.num_tokens])
        start += row.num_tokens
    for finished in tokens.finished:
        delivery.finish(finished)
    outbox.send()
    DECODED_TOKENS.inc(delivery.num_tokens)
    return delivery.ended


class _Delivery:
    def __init__(
        self, open_requests: OpenRequests, outbox: Outbox, finished: list[Finished]
    ) -> None:
        self._open = open_requests
        self._outbox = outbox
        self._stopping = {
            (each.request, each.attempt) for each in finished if each.reason == "stop"
        }
        self._stop_ids: dict[tuple[str, int], int] = {}
        self.ended: list[OpenRequest] = []
        self.num_tokens = 0

    def push(self, index: int, row: TokenRow, ids: list[int]) -> None:
        found = self._open.by_sequence(row.request, row.attempt)
        if found is None:
            return
        request, choice = found
        choice.num_cached = row.num_cached
        if row.of_prompt:
            self._push_prompt(request, choice, index, row)
            return
        ends_text = (row.request, row.attempt) in self._stopping
        if ends_text and ids[-1] in request.submit.params.stop_token_ids:
            self._stop_ids[row.request, row.attempt] = ids[-1]
        before = choice.num_tokens
        if row.position != before:
            raise ValueError(f"{row.request}: token {row.position} came where {before} belongs")
        text = choice.push(ids, last_is_mute=ends_text and not request.submit.text.includes_stop)
        num_new = choice.num_tokens - before
        self.num_tokens += num_new
        self._outbox.add_row(request, choice, index, num_new, text)
        if choice.stop is not None:
            request.cancel_choice(choice.index)
            self._outbox.add_end(request, choice, "", "stop", choice.stop)
            self._close(request, choice)

    def _push_prompt(self, request: OpenRequest, choice: Choice, index: int, row: TokenRow) -> None:
        if row.position != choice.num_told:
            raise ValueError(
                f"{row.request}: token {row.position} of the prompt came where {choice.num_told}"
                " belongs"
            )
        choice.num_told += row.num_tokens
        self._outbox.add_prompt(request, choice, index)

    def finish(self, finished: Finished) -> None:
        found = self._open.by_sequence(finished.request, finished.attempt)
        if found is None:
            return
        request, choice = found
        text = choice.finish()
        stop_id = self._stop_ids.get((finished.request, finished.attempt))
        reason = "stop" if choice.stop is not None else finished.reason
        stop_reason = choice.stop if choice.stop is not None else stop_id
        self._outbox.add_end(request, choice, text, reason, stop_reason)
        self._close(request, choice)

    def _close(self, request: OpenRequest, choice: Choice) -> None:
        del request.choices[choice.index]
        if not request.choices:
            self._open.pop(request, "finished")
            self.ended.append(request)
