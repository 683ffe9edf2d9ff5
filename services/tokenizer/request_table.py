"""The requests a tokenizer works on."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from services.tokenizer.observer import UNOBSERVED, Observer, PromptObserver
from services.tokenizer.open_choice import OpenChoice
from shared.link.peer import Peer
from shared.process.log import log_end
from shared.process.open_requests import OPEN_REQUESTS
from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions, read_options
from shared.wire.messages import MAX_LEFT_OUT, MAX_NAME_CHARS, Accepted, Cancel, RequestKey, Submit

MAX_DIGITS = 10  # of the number of a choice

Key = tuple[str, int]  # request, attempt


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One prompt of one gateway, with its choices that have not ended.

    ``choices`` is empty and ``scheduler`` None until the prompt is encoded and sent. ``prepare_s``
    is the time for that, with the wait for a thread. From then until the scheduler accepts it, it
    holds the ``answer`` to the gateway with the ids of the prompt. ``left_out`` are the keywords of
    its schemas that are not enforced.
    """

    submit: Submit
    gateway: Peer
    options: RequestOptions = field(init=False)
    encoding: asyncio.Task[None] | None = None
    scheduler: Peer | None = None
    prepare_s: float | None = None
    num_prompt_tokens: int = 0
    answer: tuple[Accepted, Array] | None = None
    left_out: list[str] = field(default_factory=list)
    choices: dict[int, OpenChoice] = field(default_factory=dict)
    observer: PromptObserver = UNOBSERVED

    def __post_init__(self) -> None:
        """Raises CodecError for bad options."""
        row = self.submit.options.copy()  # or it would keep the whole header
        self.submit = replace(self.submit, options=row)
        self.options = read_options(row)

    @property
    def request(self) -> str:
        return self.submit.request

    @property
    def attempt(self) -> int:
        return self.submit.attempt

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request, self.attempt)

    def sequence(self, choice: int) -> RequestKey:
        """The name the scheduler knows a choice by."""
        return RequestKey(f"{self.request}/{choice}", self.attempt)

    def choice(self, number: str) -> OpenChoice | None:
        """The open choice with this number at the end of its sequence's name."""
        is_number = number.isdecimal() and len(number) <= MAX_DIGITS
        return self.choices.get(int(number)) if is_number else None

    def note_left_out(self, places: list[str]) -> None:
        self.left_out = [place[:MAX_NAME_CHARS] for place in places[:MAX_LEFT_OUT]]

    def cancel(self) -> None:
        """Takes it out of the queue of prompts to encode, or back from the scheduler."""
        if self.encoding is not None:
            self.encoding.cancel()
        if self.scheduler is not None and self.choices:
            self.scheduler.send(Cancel([self.sequence(choice) for choice in self.choices]))

    def cancel_choice(self, choice: int) -> None:
        if self.scheduler is not None:
            self.scheduler.send(Cancel([self.sequence(choice)]))


class RequestTable:
    """The table of them, by the name the gateway gave. ``on_pop`` is called with each that
    leaves."""

    def __init__(
        self,
        observer: Observer | None = None,
        on_pop: Callable[[OpenRequest], None] = lambda request: None,
    ) -> None:
        self.observer = observer or Observer()
        self._on_pop = on_pop
        self._table: dict[Key, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, request: OpenRequest) -> bool:
        return self._table.get((request.request, request.attempt)) is request

    def add(self, request: OpenRequest) -> None:
        self._table[request.request, request.attempt] = request
        request.observer = self.observer.begin(request.submit, request.options, request.gateway)
        OPEN_REQUESTS.set(len(self))

    def get(self, request: str, attempt: int) -> OpenRequest | None:
        return self._table.get((request, attempt))

    def by_sequence(self, sequence: str, attempt: int) -> tuple[OpenRequest, OpenChoice] | None:
        """The request and the choice that the scheduler speaks of, if they are still open."""
        name, _, number = sequence.rpartition("/")
        request = self._table.get((name, attempt))
        choice = request.choice(number) if request is not None else None
        return (request, choice) if request is not None and choice is not None else None

    def pop(self, request: OpenRequest, reason: str) -> None:
        """Every way out leads through here, once."""
        del self._table[request.request, request.attempt]
        self._on_pop(request)
        OPEN_REQUESTS.set(len(self))
        log_end(
            "prompt ended",
            request.request,
            attempt=request.attempt,
            reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            prepare_s=request.prepare_s,
        )
        request.observer.end(reason, request.num_prompt_tokens)

    def pop_all_of(self, peer: Peer) -> Iterator[OpenRequest]:
        """Removes the requests of a gateway or a scheduler."""
        for request in list(self._table.values()):
            if peer in (request.gateway, request.scheduler):
                self.pop(request, "gateway_lost" if peer is request.gateway else "scheduler_lost")
                yield request

    def named(self, ids: set[str], owner: str) -> list[OpenRequest]:
        """The requests of ``owner`` with one of ``ids``."""
        return [
            each
            for each in self._table.values()
            if each.request.partition("~")[0] in ids and each.options.owner == owner
        ]
