"""The adapters of simulated workers: the ones they start with, load and forget."""

import asyncio
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

from msgspec.structs import replace

from services.worker.service import WorkerService
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.envelope import read_options
from shared.wire.messages import (
    ADAPTERS_MINOR,
    Adapter,
    Adapters,
    ForgetAdapter,
    LoadAdapter,
    Message,
)

LOAD_S = (0.02, 0.3, 1.0)
"""Of one worker and another."""
FORGET_S = (0.0, 0.0, 0.5)
"""Until a worker reports that it has forgotten an adapter, in turn."""
BEGUN_S = 1.0


def _adapter(name: str) -> Adapter:
    digest = blake2b(name.encode(), digest_size=16).hexdigest()
    return Adapter(name=name, digest=digest, loaded_s=BEGUN_S, path=name)


KEPT = [_adapter("sql"), _adapter("law")]
"""Each worker starts with them."""
LOADED = _adapter("tax")
"""Loaded and unloaded while the mesh runs."""
EVERY = [*KEPT, LOADED]


class AdaptingWorker(WorkerService):
    """Has ``adapters`` at the start; ``running`` returns the options of the sequences in its
    slots."""

    def __init__(
        self, config: Any, build: Any, adapters: Iterable[Adapter], running: Callable[[], Any]
    ) -> None:
        super().__init__(config, build)
        self.adapters = {each.digest: each for each in adapters}
        self._refused: list[Adapter] = []
        self._running = running
        self._loads: set[str] = set()
        self._num_forgotten = 0

    def on_up(self, peer: Peer) -> None:
        super().on_up(peer)
        self._report(peer)

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        match message:
            case LoadAdapter(load):
                if load not in self._loads:
                    self._loads.add(load)
                    load_s = LOAD_S[int(self._config.instance[1:]) % len(LOAD_S)]
                    asyncio.get_running_loop().call_later(load_s, self._read_folder, message)
            case ForgetAdapter(digest):
                assert digest not in {read_options(each).adapter for each in self._running()}
                self.adapters.pop(digest, None)
                self._num_forgotten += 1
                wait_s = FORGET_S[self._num_forgotten % len(FORGET_S)]
                asyncio.get_running_loop().call_later(wait_s, self._report_to_all)
            case _:
                super().on_message(peer, message, arrays)

    def _read_folder(self, order: LoadAdapter) -> None:
        now_s = asyncio.get_running_loop().time()
        found = next((each for each in EVERY if each.path == order.path), None)
        if found is None:
            refused = Adapter(name=order.name, load=order.load, problem="no such folder")
            self._refused.append(refused)
        else:
            row = replace(found, name=order.name, load=order.load, loaded_s=BEGUN_S + now_s)
            self.adapters[found.digest] = row
        self._report_to_all()

    def _report_to_all(self) -> None:
        assert self._link is not None
        for peer in self._link.peers:
            self._report(peer)

    def _report(self, peer: Peer) -> None:
        if peer.hello.minor >= ADAPTERS_MINOR:
            peer.send(Adapters([*self.adapters.values(), *self._refused]))


def served_at(gateway: Any) -> set[str]:
    """A gateway's adapters by name."""
    known = (each._known for each in gateway._apis if hasattr(each, "_known"))
    return {each.digest for found in known for each in found.by_name.values()}


async def order(gateway: Any, message: Message) -> None:
    """What the gateway's endpoints do."""
    for each in gateway._mesh.tokenizers:
        if each.peer.hello.minor >= ADAPTERS_MINOR:
            each.peer.send(message)
