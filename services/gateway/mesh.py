"""The tokenizers a gateway is connected to, and the requests that each of them has open."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from services.gateway.exchange import Exchange
from services.gateway.job import Job
from shared.errors import RETRY_AFTER_S, RequestError, Unavailable
from shared.messages import (
    Accepted,
    Cancel,
    Deltas,
    Failed,
    Hello,
    Message,
    ModelInfo,
    RequestKey,
    Submit,
)
from shared.peer import Peer

log = logging.getLogger(__name__)

FIRST_ATTEMPT = 1

OpenRequests = dict[RequestKey, Exchange]


class Mesh:
    """Sends each request to one tokenizer and brings what comes back to its Exchange.

    What belongs to no open request of the peer that sent it, such as an old attempt, is ignored.
    """

    def __init__(self) -> None:
        self._open: dict[Peer, OpenRequests] = {}

    @property
    def model(self) -> ModelInfo:
        """What is served. Raises Unavailable as long as nobody told."""
        for peer in self._open:
            if peer.hello.model is not None:
                return peer.hello.model
        raise self._unavailable()

    @property
    def obstacle(self) -> str | None:
        """Why no request can be served now, or None."""
        if not self._open:
            return "no tokenizer is connected"
        if any(peer.is_ready for peer in self._open):
            return None
        return "; ".join(f"{peer}: {peer.status.reason}" for peer in self._open)

    @contextmanager
    def exchange(self, request: str, job: Job) -> Iterator[Exchange]:
        """Submits ``job``; leaving the context cancels what has not ended. Raises Unavailable."""
        peer = self._least_loaded()
        key, exchange = RequestKey(request, FIRST_ATTEMPT), Exchange()
        self._open[peer][key] = exchange
        try:
            peer.send(Submit(request, FIRST_ATTEMPT, job.kind, job.params, job.stop), job.prompt)
            yield exchange
        finally:
            if self._open.get(peer, {}).pop(key, None):
                peer.send(Cancel([key]))

    def refusal(self, hello: Hello) -> str | None:
        if hello.model is None:
            return "a tokenizer must tell its model"
        for peer in self._open:
            if peer.hello.model and peer.hello.model.fingerprint != hello.model.fingerprint:
                return f"another model than {peer} has"
        return None

    def on_up(self, peer: Peer) -> None:
        self._open[peer] = {}

    def on_down(self, peer: Peer, reason: str) -> None:
        text = f"the {peer} is gone: {reason}"
        for exchange in self._open.pop(peer).values():
            exchange.fail(Unavailable(text, retry_after_s=RETRY_AFTER_S))

    def fail_all(self, reason: str) -> None:
        """Ends every open request with an error, where its client can still be told."""
        for open_requests in self._open.values():
            for exchange in open_requests.values():
                exchange.fail(Unavailable(reason, retry_after_s=RETRY_AFTER_S))

    def on_message(self, peer: Peer, message: Message) -> None:
        open_requests = self._open[peer]
        match message:
            case Deltas():
                _deliver(message, open_requests)
            case Accepted(request, attempt):
                if exchange := open_requests.get(RequestKey(request, attempt)):
                    exchange.accept()
            case Failed(request, attempt):
                if exchange := open_requests.pop(RequestKey(request, attempt), None):
                    exchange.fail(RequestError.from_failed(message))
            case _:
                log.warning("%s sent a %s, which we do not read", peer, type(message).__name__)

    def _least_loaded(self) -> Peer:
        ready = [peer for peer in self._open if peer.is_ready]
        if not ready:
            raise self._unavailable()
        return min(ready, key=lambda peer: (len(self._open[peer]), peer.status.load))

    def _unavailable(self) -> Unavailable:
        return Unavailable(self.obstacle or "no model is known", retry_after_s=RETRY_AFTER_S)


def _deliver(deltas: Deltas, open_requests: OpenRequests) -> None:
    for row in deltas.rows:
        if exchange := open_requests.get(RequestKey(row.request, row.attempt)):
            exchange.add(row.text, row.num_tokens)
    for finished in deltas.finished:
        if exchange := open_requests.pop(RequestKey(finished.request, finished.attempt), None):
            exchange.finish(finished)
