"""What one step sends up: a single Deltas for each gateway."""

from collections import defaultdict

from services.tokenizer.open_requests import CHOICE, OpenRequest
from shared.messages import Delta, Deltas, Finished, FinishReason
from shared.peer import Peer


class Outbox:
    def __init__(self) -> None:
        self._deltas: dict[Peer, Deltas] = defaultdict(lambda: Deltas([], []))

    def add_text(self, request: OpenRequest, position: int, num_tokens: int, text: str) -> None:
        if num_tokens or text:
            self._deltas[request.gateway].rows.append(
                Delta(request.request, request.attempt, CHOICE, position, num_tokens, text)
            )

    def add_finished(self, request: OpenRequest, reason: FinishReason) -> None:
        self._deltas[request.gateway].finished.append(
            Finished(
                request.request,
                request.attempt,
                reason,
                request.num_prompt_tokens,
                request.stream.num_tokens,
            )
        )

    def send(self) -> None:
        for gateway, deltas in self._deltas.items():
            gateway.send(deltas)
