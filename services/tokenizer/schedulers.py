"""The schedulers that a tokenizer is connected to, and the choice of one for a prompt.

Each is a cell: a scheduler with its own workers. Prompts that begin alike go to the same cell,
which may have computed the beginning already: the cell with the highest score for the beginning
(rendezvous hashing, Thaler and Ravishankar 1998; with weights, Schindelhauer and Schomaker 2005),
unless it has much more work than the others (bounded loads, Mirrokni, Thorup and Zadimoghaddam
2018).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import log
from typing import NamedTuple

from shared.errors import RETRY_AFTER_S, Unavailable
from shared.link.extension import Objection, able
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions, hash_root
from shared.wire.messages import MAX_CELLS, MINORS, Generate, Heartbeat, Item, Overview

BEGINNING = 64  # tokens: more than templates have before the first message. Chosen
MAX_EXCESS = 1.25  # of a cell's fair share of all sequences, as long as it has a slot. Chosen


class Cell(NamedTuple):
    """``load`` sequences run or wait in ``num_slots`` slots, at least one."""

    name: str
    num_slots: int
    load: int


@dataclass
class _Ours:
    """The sequences of ours that a scheduler has, now and when its last heartbeat was noticed."""

    heartbeat: Heartbeat
    num: int = 0
    num_before: int = 0


class Schedulers:
    """A prompt goes to none with one of the ``objections``."""

    def __init__(self) -> None:
        self.objections: list[Objection] = []
        self._ours: dict[Peer, _Ours] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._ours)

    def add(self, peer: Peer) -> None:
        self._ours[peer] = _Ours(peer.status)

    def remove(self, peer: Peer) -> None:
        del self._ours[peer]

    @property
    def are_ready(self) -> bool:
        return any(peer.is_ready for peer in self)

    @property
    def unready_reason(self) -> str:
        """Why none is ready."""
        return next((peer.status.reason for peer in self), "no scheduler is connected")

    @property
    def overviews(self) -> list[Overview]:
        known = [each for peer in self if (each := peer.status.overview) is not None]
        return known[: MAX_CELLS + 1]

    def choose(self, generate: Generate, options: RequestOptions, ids: Array) -> Peer | None:
        """Returns the scheduler for a prompt of ``ids`` [n] int32, which is then sent there; None
        if none is connected. A scheduler without workers is chosen only if all are without, a
        leaving one only if all ready ones are leaving, and the one that it left only if no other of
        these exists. Raises the error of an objection against all, and Unavailable if none
        takes the images of the prompt.
        """
        usable = _usable(_with_media(able(list(self), options, self.objections), generate))
        left = options.left_scheduler
        peers = [peer for peer in usable if peer.hello.instance != left] or usable
        if not peers:
            return None
        num_new = len(generate.sequences)
        chosen = peers[0]
        if len(peers) > 1:
            cells = {self._cell(peer): peer for peer in peers}
            beginning = beginning_of(ids, options, generate.items)
            chosen = cells[choose_cell(list(cells), num_new, beginning, generate.request)]
        self._ours_at(chosen).num += num_new
        return chosen

    def note_end(self, peer: Peer, num: int) -> None:
        """A prompt of ``num`` sequences has ended there; ``peer`` may be gone."""
        if peer in self._ours:
            self._ours_at(peer).num -= num

    def _cell(self, peer: Peer) -> Cell:
        """The counts of other tokenizers' requests there are as old as the heartbeat."""
        overview, ours = peer.status.overview, self._ours_at(peer)
        if overview is None:
            return Cell(peer.hello.instance, 1, ours.num)
        load = overview.num_running + overview.num_waiting + ours.num - ours.num_before
        return Cell(peer.hello.instance, max(1, overview.num_slots), max(load, ours.num))

    def _ours_at(self, peer: Peer) -> _Ours:
        ours = self._ours[peer]
        if ours.heartbeat is not peer.status:
            ours.heartbeat, ours.num_before = peer.status, ours.num
        return ours


def _with_media(peers: list[Peer], generate: Generate) -> list[Peer]:
    """The ``peers`` that know of the prompt's kinds of items."""
    least = max((MINORS[item.kind] for item in generate.items), default=0)
    found = [peer for peer in peers if peer.hello.minor >= least]
    if peers and not found:
        raise Unavailable(
            "no connected scheduler takes images or videos of the prompt; all are of old releases",
            retry_after_s=RETRY_AFTER_S,
        )
    return found


def _usable(peers: list[Peer]) -> list[Peer]:
    ready = [peer for peer in peers if peer.is_ready]
    staying = [peer for peer in ready if not _is_leaving(peer)]
    return staying or ready or peers


def _is_leaving(peer: Peer) -> bool:
    return peer.status.overview is not None and peer.status.overview.is_leaving


def beginning_of(ids: Array, options: RequestOptions, items: Sequence[Item] = ()) -> bytes | None:
    """The common beginning of prompts that should go to the same cell; None for a prompt too short
    to gain from it. ``ids`` [n] int32, with the images ``items``."""
    if len(ids) < BEGINNING:
        return None
    begins_with_item = bool(items) and items[0].start < BEGINNING
    image = items[0].digest if begins_with_item else b""
    return hash_root(options) + ids[:BEGINNING].tobytes() + image


def choose_cell(cells: Sequence[Cell], num_new: int, beginning: bytes | None, name: str) -> Cell:
    """Returns one of ``cells`` for the ``num_new`` sequences of the prompt ``name``.

    The load of the chosen one was below its limit (``_limit``) if there is a ``beginning``.
    Otherwise it is the lowest for its slots.
    """
    if beginning is None:
        own = name.encode()  # so that not all take the same one of equal cells
        return min(
            cells, key=lambda each: ((each.load + num_new) / each.num_slots, -_score(each, own))
        )
    load = num_new + sum(each.load for each in cells)
    share = load / sum(each.num_slots for each in cells)
    free = [each for each in cells if each.load < _limit(each, share)]
    return max(free, key=lambda each: _score(each, beginning))


def _limit(cell: Cell, share: float) -> float:
    """A little more than its part of ``share`` sequences for each slot, but none that would wait
    while others have slots. The parts of all cells add up to all sequences, the new ones included,
    so there is always a cell below its limit."""
    part = share * cell.num_slots
    return max(part, min(MAX_EXCESS * part, cell.num_slots))


def _score(cell: Cell, key: bytes) -> float:
    digest = blake2b(key, digest_size=8, key=cell.name.encode()).digest()
    drawn = ((int.from_bytes(digest) >> 12) + 0.5) / 2**52  # between 0 and 1, never either
    return -cell.num_slots / log(drawn)
