"""The plans of a worker whose ranks have stores; each rank runs them in a process of its own."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.services.worker.ranks.rank_processes import Texts
from tests.services.worker.stores.test_blocks import random_ids
from tests.services.worker.stores.worker import StoreWorker, key_of

IDS = random_ids(37, 150)
NUM_FULL = 2  # blocks of 16
OWN, OTHERS = [0, 1, 2, 3, 4, 5, 6, 7], [20, 21, 22, 23, 24, 25, 26, 27]
NO_LOGPROBS = np.zeros((0, 0))


def of(engine: Any) -> StoreWorker:
    return StoreWorker(Path(), Path(), make=lambda *_, **__: engine)


def saved_texts(engine: Any, num_steps: int) -> Texts:
    """All ranks save their parts."""
    worker = of(engine)
    text = worker.generate(IDS, OWN)
    copied = worker.save(OWN[:NUM_FULL])
    worker.close()
    return Texts([text, [len(copied.unsaved)]], NO_LOGPROBS)


def loaded_texts(engine: Any, num_steps: int) -> Texts:
    """A successor loads them."""
    worker = of(engine)
    copied = worker.load(OTHERS[:NUM_FULL])
    text = worker.generate(IDS, OTHERS, num_cached=16 * NUM_FULL)
    worker.close()
    return Texts([text, [len(copied.lost)]], NO_LOGPROBS)


def damaged_texts(engine: Any, num_steps: int) -> Texts:
    """The first rank's part of the last block is intact, and the other rank's is not."""
    worker = of(engine)
    if worker.engine._parallel.rank == 1:
        places = worker.part.own.parts[0]
        start = (NUM_FULL - 1) * places.part.place_bytes
        (byte,) = os.pread(places._blocks, 1, start)
        os.pwrite(places._blocks, bytes([byte ^ 1]), start)
    copied = worker.load(OTHERS[:NUM_FULL])
    lost = [int(copied.lost == [key_of(NUM_FULL - 1)])]
    text = worker.generate(IDS, OTHERS, num_cached=16 * (NUM_FULL - 1))
    worker.close()
    return Texts([text, lost], NO_LOGPROBS)
