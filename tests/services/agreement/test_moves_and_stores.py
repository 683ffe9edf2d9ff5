"""A worker whose blocks are both saved and moved."""

from pathlib import Path

from services.worker.stores.addition import KVStore
from shared.wire.messages import Copied, Load, Save, Take
from tests.services.worker.checkpoints import save_qwen2
from tests.services.worker.moves.worker import key_of, working


async def test_a_block_is_taken_before_the_same_plan_saves_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_qwen2(model)
    settings = {"kv_offloading_size": 1 / 64, "kv_offloading_dir": tmp_path / "stores"}
    async with (
        working(model, tmp_path, "a") as source,
        working(model, tmp_path, "b", **settings) as target,
    ):
        await source.prefill([*range(10, 42)], 32, [0, 1, 2], 0, 0)
        source.meet(target)
        await source.push(target, [1])
        await target.arrived(1)
        (store,) = [each for each in target.engine.additions if isinstance(each, KVStore)]
        copied: list[Copied] = []
        store.part.on_copied = copied.append
        await target.step(rows=[Take(key_of(0), 5), Save(key_of(0), 5, 0)])
        await target.step(rows=[Load(key_of(0), 6, store.part.own.header.id, 0)])
        assert [(each.lost, each.unsaved) for each in copied] == [([], []), ([], [])]
        assert target.bytes_of(6) == source.bytes_of(1)
        store.close()
