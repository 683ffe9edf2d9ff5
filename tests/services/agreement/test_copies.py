"""Blocks that move between workers are saved in stores, as plans of the scheduler ask for it."""

from pathlib import Path
from typing import Any

from shared.wire.messages import Forget, Load, Save, Take
from tests.services.worker.checkpoints import save_qwen2
from tests.services.worker.moves.worker import key_of, random_ids, working


async def test_a_block_is_saved_by_the_plan_that_takes_it(tmp_path: Path) -> None:
    """Parts of a step run in this order."""
    model = tmp_path / "model"
    save_qwen2(model)
    store: dict[str, Any] = {"kv_offloading_size": 1 / 64, "kv_offloading_dir": tmp_path / "kv"}
    async with (
        working(model, tmp_path, "a") as a,
        working(model, tmp_path, "b", **store) as b,
    ):
        await a.prefill(random_ids(37, 150), 37, [0, 1, 2], 0, 0)
        a.meet(b)
        await a.push(b, [0])
        await b.arrived(1)
        name = b.engine.additions[-1].part.own.header.id
        await b.step(rows=[Take(key_of(0), 7), Save(key_of(0), 7, 3)])
        await b.step(rows=[Forget(4), Load(key_of(0), 9, name, 3)])
        assert b.bytes_of(9) == b.bytes_of(7) == a.bytes_of(0)
