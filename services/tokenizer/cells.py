"""Chooses the cell of a prompt: a scheduler with its own workers. Pure.

Prompts that begin alike go to the same cell, which may have computed the beginning already: the
cell with the highest score for the beginning (rendezvous hashing, Thaler and Ravishankar 1998; with
weights, Schindelhauer and Schomaker 2005), unless it has much more work than the others (bounded
loads, Mirrokni, Thorup and Zadimoghaddam 2018).
"""

from collections.abc import Sequence
from hashlib import blake2b
from math import log
from typing import NamedTuple

from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions, hash_root
from shared.wire.messages import Item

BEGINNING = 64  # tokens: more than templates have before the first message. Chosen
MAX_EXCESS = 1.25  # of a cell's fair share of all sequences, as long as it has a slot. Chosen


class Cell(NamedTuple):
    """``load`` sequences run or wait in ``num_slots`` slots, at least one."""

    name: str
    num_slots: int
    load: int


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
