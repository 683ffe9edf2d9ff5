"""Emitted tokens, against a plain loop."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.accept.output import FULL, RETRIED, RUNS, STOPPED
from kernels.sample import NOT_COMPILED, NOT_FINITE, NOTHING_LEFT
from services.worker.slots.table import SlotTable
from services.worker.step.batch import Batch
from services.worker.step.verify import AcceptOutcome, verify
from shared.wire.messages import Capacity, SamplingParams

EOS_IDS = np.array([0])
IDS = st.integers(0, 3)  # so few that drafts are right and outputs end
KNOWN = 4

ROWS = st.fixed_dictionaries(
    {
        "drafts": st.lists(IDS, max_size=4),
        "sampled": st.lists(
            st.one_of(IDS, st.sampled_from([NOT_FINITE, NOTHING_LEFT, NOT_COMPILED])),
            min_size=5,
            max_size=5,
        ),
        "room": st.integers(1, 6),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(IDS, max_size=1),
    }
)


def verified(row: dict[str, Any]) -> tuple[list[int], int, int]:
    """Tokens, accepted drafts among them, and the code."""
    tokens: list[int] = []
    num_right = 0
    for place, token in enumerate(row["sampled"][: 1 + len(row["drafts"])]):
        if token < 0:
            is_retried = token == NOT_COMPILED or (token == NOT_FINITE and row["drafts"])
            return tokens, num_right, RUNS if tokens else RETRIED if is_retried else token
        tokens.append(token)
        is_right = place < len(row["drafts"]) and row["drafts"][place] == token
        num_right += is_right
        stops = token in row["stop_token_ids"] or (token in EOS_IDS and not row["ignore_eos"])
        if stops or len(tokens) == row["room"]:
            return tokens, num_right, STOPPED if stops else FULL
        if not is_right:
            break
    return tokens, num_right, RUNS


@given(st.lists(ROWS, min_size=1, max_size=5))
def test_tokens_are_taken_as_far_as_drafts_are_right_and_nothing_ends_them(
    rows: list[dict[str, Any]],
) -> None:
    outcome = sample_and_accept(rows)
    start = 0
    for index, row in enumerate(rows):
        tokens, num_right, code = verified(row)
        num = len(tokens)
        assert outcome.num_emitted[index] == num
        assert outcome.tokens[index, :num].tolist() == tokens
        assert outcome.num_accepted[index] == num_right
        assert outcome.codes[index] == code
        assert outcome.emitted[start : start + num].tolist() == tokens
        start += num
    assert len(outcome.emitted) == len(outcome.rows) == start
    sampled = np.concatenate([row["sampled"][: 1 + len(row["drafts"])] for row in rows])
    assert sampled[outcome.rows].tolist() == outcome.emitted.tolist()


def sample_and_accept(rows: list[dict[str, Any]]) -> AcceptOutcome:
    table = SlotTable(Capacity(8, 4, len(rows), 64, 12, 10, 4))
    slots = np.arange(len(rows))[::-1].copy()
    for slot, row in zip(slots.tolist(), rows, strict=True):
        drafts = row["drafts"]
        table.num_tokens[slot] = KNOWN
        table.ids[slot, KNOWN : KNOWN + len(drafts)] = drafts
        table.end[slot] = KNOWN + row["room"]
        table.ignore_eos[slot] = row["ignore_eos"]
        table.params[slot] = SamplingParams(0, stop_token_ids=row["stop_token_ids"])
        table.has_stop_ids[slot] = bool(row["stop_token_ids"])
    nums = np.array([len(row["drafts"]) for row in rows])
    batch = SimpleNamespace(
        slots=slots, sampling_slots=slots, num_drafts=nums, sampling_rows=np.arange(len(rows))
    )
    sampled = np.concatenate([row["sampled"][: 1 + len(row["drafts"])] for row in rows])
    return verify(table, cast(Batch, batch), sampled, EOS_IDS)
