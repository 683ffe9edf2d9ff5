"""If GPU memory is short, prompts of the step fail, and decoding sequences continue."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.harness.engines import make_engine
from services.worker.engine.device.engine import DeviceEngine
from shared.wire.messages import Admit, Prefill
from tests.services.worker.test_engine_contract import FOREVER, NO_IDS, admit, ids, plan, step

NUM_TOO_MANY = 6


@pytest.fixture
def engine(checkpoint: Path) -> DeviceEngine:
    """Slot 0 decodes."""
    engine = make_engine(checkpoint, "device", enforce_eager=True)
    step(engine, plan(admit=[admit(0, 5)], prefill=[Prefill(0, 5)]), ids(5))
    return engine


def run_short(
    engine: DeviceEngine, monkeypatch: pytest.MonkeyPatch, is_short: Callable[[int], bool]
) -> list[int]:
    """Steps with this many tokens run out of memory; returns the tokens of each attempt."""
    model, tried = engine._segments.model, []
    forward = model.forward

    def short(input_ids: Tensor, positions: Tensor) -> Tensor:
        tried.append(len(input_ids))
        if is_short(len(input_ids)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. Process")
        return forward(input_ids, positions)

    monkeypatch.setattr(model, "forward", short)
    return tried


def test_prompts_fail_and_rows_that_decode_go_on(
    engine: DeviceEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = run_short(engine, monkeypatch, lambda num: num >= NUM_TOO_MANY)
    both = plan(admit=[admit(1, 9)], prefill=[Prefill(1, 9)], decode=[0])
    result, tokens = step(engine, both, ids(9))
    goes_on, failed = sorted(result.rows, key=lambda row: row.slot)
    assert (goes_on.slot, goes_on.run.num_tokens, goes_on.error) == (0, 1, None)
    assert (failed.slot, failed.request, failed.run.num_tokens) == (1, "r1", 0)
    assert "memory does not suffice" in str(failed.error)
    assert "max-num-batched-tokens" in str(failed.error)
    assert "Tried to allocate 9.00 GiB" in str(failed.error)
    assert "max-num-batched-tokens" in caplog.text
    assert (len(tokens), tried, engine.num_running) == (1, [10, 1], 1)


def test_a_text_is_the_same_if_another_sequence_failed_beside_it(
    checkpoint: Path, engine: DeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = make_engine(checkpoint, "device", enforce_eager=True)
    step(alone, plan(admit=[admit(0, 5)], prefill=[Prefill(0, 5)]), ids(5))
    wanted = [step(alone, plan(decode=[0]), NO_IDS)[1].tolist() for _ in range(3)]
    run_short(engine, monkeypatch, lambda num: num >= NUM_TOO_MANY)
    first = plan(admit=[admit(1, 9)], prefill=[Prefill(1, 9)], decode=[0])
    found = [step(engine, first, ids(9))[1].tolist()]
    found += [step(engine, plan(decode=[0, 1]), NO_IDS)[1].tolist() for _ in range(2)]
    assert found == wanted


def test_a_sequence_admitted_on_uncomputed_blocks_fails_too(
    engine: DeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan may be in flight already, and so may one that takes its blocks in turn. Sequences
    without such blocks do not fail."""
    with monkeypatch.context() as patch:
        run_short(engine, patch, lambda num: num >= NUM_TOO_MANY)
        step(engine, plan(admit=[admit(1, 9)], prefill=[Prefill(1, 9)]), ids(9))
    for slot in (2, 3):
        blocks = [*admit(slot - 1, 9).blocks[:2], *admit(slot, 9).blocks[2:]]
        hit = Admit(slot, f"r{slot}", 1, 0, 0, 9, 9, 8, FOREVER, blocks)
        result, _ = step(engine, plan(admit=[hit], prefill=[Prefill(slot, 1)]), ids(9))
        assert "prefix of its prompt was not computed" in str(result.rows[0].error)
    writer = plan(release=[1], admit=[admit(1, 9)], prefill=[Prefill(1, 9)])
    result, tokens = step(engine, writer, ids(9))
    assert [(row.slot, row.error) for row in result.rows] == [(1, None)]
    assert len(tokens) == 1


def test_plans_that_were_made_when_it_was_known_hit_prefixes_again(
    engine: DeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(engine, plan(admit=[admit(1, 9)], prefill=[Prefill(1, 9)]), ids(9))
    with monkeypatch.context() as patch:
        run_short(engine, patch, lambda num: num >= NUM_TOO_MANY)
        result, _ = step(engine, plan(admit=[admit(2, 9)], prefill=[Prefill(2, 9)]), ids(9))
    assert "memory does not suffice" in str(result.rows[0].error)
    step(engine, plan(decode=[0]), NO_IDS)
    blocks = [*admit(1, 9).blocks[:2], *admit(3, 19).blocks[2:]]
    hit = Admit(3, "r3", 1, 0, 0, 19, 19, 8, FOREVER, blocks)
    result, tokens = step(engine, plan(admit=[hit], prefill=[Prefill(3, 11)]), ids(19))
    assert [(row.slot, row.error) for row in result.rows] == [(3, None)]
    assert len(tokens) == 1


def test_a_step_that_only_decodes_has_no_sequence_to_fail(
    engine: DeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_short(engine, monkeypatch, lambda num: True)
    with pytest.raises(torch.OutOfMemoryError, match="max-num-seqs"):
        step(engine, plan(decode=[0]), NO_IDS)
