"""Adapters between gateways and schedulers: lists go up, orders go down."""

from collections.abc import Sequence

from services.tokenizer.schedulers import Schedulers
from shared.adapters.joined import digests, join
from shared.adapters.listeners import Listeners, send_all
from shared.errors import ADAPTER_LOST, RETRY_AFTER_S, RequestError, Unavailable
from shared.link.extension import Extension
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions
from shared.wire.messages import Adapter, Adapters, LoadAdapter, Message, UnloadAdapter


class AdapterRelay(Extension):
    """A request goes to a scheduler whose workers have its adapter."""

    def __init__(self, schedulers: Schedulers) -> None:
        self._schedulers = schedulers
        self._lists: dict[Peer, list[Adapter]] = {}
        self._digests: dict[Peer, set[str]] = {}
        self._gateways = Listeners()
        schedulers.objections.append(self._objection)

    def on_up(self, peer: Peer) -> None:
        if peer.hello.service == "gateway":
            self._gateways.add(peer)

    def on_down(self, peer: Peer) -> None:
        self._gateways.remove(peer)
        self._digests.pop(peer, None)
        if self._lists.pop(peer, None) is not None:
            self._gateways.announce(join(self._lists.values()))

    def takes(self, peer: Peer, message: Message, arrays: Sequence[Array] = ()) -> bool:
        match message, peer.hello.service:
            case Adapters(adapters), "scheduler":
                self._lists[peer], self._digests[peer] = adapters, digests(adapters)
                self._gateways.announce(join(self._lists.values()))
            case LoadAdapter() | UnloadAdapter(), "gateway":
                send_all(self._schedulers, message)
            case _:
                return False
        return True

    def _objection(self, scheduler: Peer, options: RequestOptions) -> RequestError | None:
        if not options.adapter or options.adapter in self._digests.get(scheduler, ()):
            return None
        return Unavailable(
            f"no connected scheduler has a worker with the adapter {options.adapter}",
            code=ADAPTER_LOST,
            retry_after_s=RETRY_AFTER_S,
        )
