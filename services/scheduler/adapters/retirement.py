"""Orders about adapters, and the adapters that take no new requests: unloaded ones, and older ones
of a name. Pure."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from shared.adapters.joined import join, served
from shared.wire.messages import Adapter, LoadAdapter, UnloadAdapter

MAX_LOADS = 4096
"""Orders that are remembered, the latest ones."""

Owner = TypeVar("Owner")
Key = TypeVar("Key")
Value = TypeVar("Value")


class Retirement:
    """Remembers orders, which come once from each tokenizer. An adapter of the start has an empty
    load, so that an order holds for workers that come later too. The last order of a name is *open*
    until it is refused, or its adapter is retired."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by load, oldest first
        self._unloads: dict[str, None] = {}
        self._open: dict[str, LoadAdapter] = {}  # by name
        self._retired: dict[tuple[str, str, str], None] = {}  # names, loads, digests or all of them

    def load(self, order: LoadAdapter) -> None:
        """Does nothing for an order that is known."""
        if order.load in self._names:
            return
        self._names[order.load] = order.name
        self._open.pop(order.name, None)
        self._open[order.name] = order
        limit(self._names)
        limit(self._open)

    def unload(self, order: UnloadAdapter, adapters: Iterable[Adapter]) -> None:
        """Retires those of ``adapters`` with this name, and those still being loaded under it. Does
        nothing for an order that is known."""
        if order.unload in self._unloads:
            return
        self._unloads[order.unload] = None
        limit(self._unloads)
        loads = {load for load, name in self._names.items() if name == order.name}
        loads |= {each.load for each in adapters if each.name == order.name}
        for load in sorted(loads):
            self._retire(order.name, load)

    def open_orders(self, adapters: Iterable[Adapter]) -> list[LoadAdapter]:
        """The open orders, without those that are refused in ``adapters``."""
        refused = {each.load for each in adapters if each.problem}
        self._open = {
            name: order for name, order in self._open.items() if order.load not in refused
        }
        return [*self._open.values()]

    def marked(self, lists: Mapping[Owner, list[Adapter]]) -> dict[Owner, list[Adapter]]:
        """The ``lists`` of workers with the retired rows marked. An adapter is retired for ever
        once a worker has loaded the served one of its name after it."""
        found = self._marked(lists, {})
        names = {name: each.digest for name, each in served(join(found.values())).items()}
        for each in (older for rows in found.values() for older in _older(rows, names)):
            self._retire(each.name, each.load, each.digest)
        return self._marked(lists, names)

    def _marked(
        self, lists: Mapping[Owner, list[Adapter]], names: Mapping[str, str]
    ) -> dict[Owner, list[Adapter]]:
        """The served adapters of ``names`` are not retired: a later order loaded them again."""

        def is_retired(each: Adapter) -> bool:
            keys = {(each.name, each.load, ""), (each.name, each.load, each.digest)}
            is_served = bool(each.digest) and names.get(each.name) == each.digest
            return not is_served and not keys.isdisjoint(self._retired)

        return {
            owner: [replace(each, is_retired=is_retired(each)) for each in rows]
            for owner, rows in lists.items()
        }

    def _retire(self, name: str, load: str, digest: str = "") -> None:
        self._retired[name, load, digest] = None
        limit(self._retired)
        if name in self._open and self._open[name].load == load:
            del self._open[name]


def _older(rows: list[Adapter], names: Mapping[str, str]) -> list[Adapter]:
    """Those of a worker's rows that are older than the served one of their name there."""
    served_s = {each.name: each.loaded_s for each in rows if names.get(each.name) == each.digest}
    return [
        each for each in rows if not each.problem and each.loaded_s < served_s.get(each.name, 0.0)
    ]


def conflicts(lists: Iterable[list[Adapter]]) -> set[tuple[str, str, str]]:
    """A name, its served adapter and another one, for each worker that has the other one for new
    requests and lacks the served one."""
    lists = [*lists]
    names = served(join(lists))
    found = set()
    for rows in lists:
        own = {(each.name, each.digest) for each in rows}
        for name, each in served(rows).items():
            if name in names and (name, names[name].digest) not in own:
                found.add((name, names[name].digest, each.digest))
    return found


def limit(remembered: dict[Key, Value]) -> None:
    """Forgets the oldest of more than ``MAX_LOADS``."""
    while len(remembered) > MAX_LOADS:
        del remembered[next(iter(remembered))]
