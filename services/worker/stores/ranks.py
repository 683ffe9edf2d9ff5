"""The stores of a worker's ranks on one host. Each saves and loads its heads' part of a block, in a
store of its own with the name and the number of the first rank's. A block is there if all ranks
have their part."""

from collections.abc import Callable

import torch

from services.worker.block_layout.memory import BlockMemory, StateMemory
from services.worker.layers.parallel import Parallel
from services.worker.stores.opening import Named, OpenStore
from services.worker.stores.part import HostPart, Rows, is_answered
from shared.errors import ConfigError
from shared.wire.messages import Copied, Load, Save

ID_BYTES = 8


def facts_of_rank(parallel: Parallel) -> dict[str, object]:
    """They decide about its bytes, too."""
    return {"rank": [parallel.rank, parallel.size, parallel.has_whole_experts]}


def open_in_turn(parallel: Parallel, open_store: Callable[[Named | None], OpenStore]) -> OpenStore:
    """Ranks share the room in a folder, so that each counts it after the others have taken theirs.
    Raises ConfigError."""
    opened, named = None, None
    for rank in range(parallel.size):
        error = None
        if rank == parallel.rank:
            try:
                opened = open_store(named)
            except ConfigError as problem:
                error = problem
        if not parallel.least(int(error is None)):
            raise error or ConfigError(f"kv-offloading-size: rank {rank} has no store: see its log")
        if rank == 0:
            named = _name_of_first(parallel, opened)
    assert opened is not None
    return opened


def _name_of_first(parallel: Parallel, opened: OpenStore | None) -> Named:
    own = [0] * (1 + ID_BYTES)
    if opened is not None:
        own = [opened.number, *bytes.fromhex(opened.own.header.id)]
    number, *name = parallel.first(torch.tensor(own)).tolist()
    return Named(number, bytes(name).hex())


class RankPart(HostPart):
    """``Copied`` says the same on all ranks."""

    def __init__(
        self, store: OpenStore, blocks: BlockMemory, states: StateMemory, parallel: Parallel
    ) -> None:
        super().__init__(store, None, blocks, states)
        self._parallel = parallel

    def _copy(self, step: int, rows: Rows) -> Copied:
        copied = super()._copy(step, rows)
        if not is_answered(rows):
            return copied
        loads = [row.key for row in rows if isinstance(row, Load)]
        saves = [row.key for row in rows if isinstance(row, Save)]
        failed = [
            copied.is_down,
            *(key in copied.lost for key in loads),
            *(key in copied.unsaved for key in saves),
        ]
        of_ranks = self._parallel.gather(torch.tensor(failed, dtype=torch.int64))
        is_down, *have_failed = of_ranks.any(0).tolist()
        pairs = [*zip([*loads, *saves], have_failed, strict=True)]
        lost = [key for key, has_failed in pairs[: len(loads)] if has_failed]
        unsaved = [key for key, has_failed in pairs[len(loads) :] if has_failed]
        return Copied(step, lost, unsaved, is_down, copied.load_s)
