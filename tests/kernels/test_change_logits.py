"""Logits rules by slot: against loops over tokens, and bit for bit against the host's
implementation."""

from typing import Any

import numpy as np
import pytest
import torch

from kernels.change_logits import change_logits
from kernels.change_logits.reference import changed_row
from kernels.sample import adjust, prepare_adjustments
from kernels.slot_state import SlotState, empty_slots
from services.worker.engine.device.device_slots import is_for_device, rule_row
from services.worker.slots.logits_rules import make_logits_rules, row_change
from shared.wire.messages import SamplingParams
from tests.kernels.slots import copied

CPU = torch.device("cpu")
NUM_SLOTS, MAX_DRAFTS, VOCAB_SIZE = 8, 3, 1500  # more than a chunk
EOS_IDS = np.array([2, 1400])
TOLERANCE = 1e-5  # of float32
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.9},
    {"logit_bias": [(7, 3.3), (1300, -100.0)], "min_tokens": 4, "stop_token_ids": [9, 1201]},
    {"allowed_token_ids": [3, 8, 9, 1200, 1499], "presence_penalty": 2.0},
    {"bad_words": [[5], [1100]], "logit_bias": [(5, 50.0)]},
    {"min_tokens": 40, "repetition_penalty": 1.1, "logit_bias": [(2, 8.0)]},
)


def params_of(slot: int) -> SamplingParams:
    return SamplingParams(seed=0, **ASKED[slot])


def slots_of(rng: np.random.Generator, texts: list[list[int]], prompt_len: int) -> SlotState:
    """As after the admission of their sequences, with drafts."""
    state = empty_slots(NUM_SLOTS, VOCAB_SIZE, MAX_DRAFTS, 1, 1, 0, 1, CPU)
    state.ids[:] = torch.from_numpy(rng.integers(0, 12, state.ids.shape))
    for slot, text in enumerate(texts):
        ids = np.array(text, np.int32)
        state.num_tokens[slot] = len(ids)
        rules = make_logits_rules(params_of(slot), ids, prompt_len)
        if rules is not None:
            assert is_for_device(rules)
            row = rule_row(rules, ids, prompt_len, EOS_IDS, VOCAB_SIZE)
            for target, values in zip(state.rules, row, strict=True):
                target[slot] = torch.from_numpy(np.asarray(values)).to(target.dtype)
    return state


@pytest.mark.parametrize("num_drafts", range(MAX_DRAFTS + 1))
def test_logits_are_changed_as_the_reference_and_the_host_change_them(
    device: torch.device, num_drafts: int
) -> None:
    """With few ids, so that they repeat in prompt, output and drafts."""
    rng, prompt_len = np.random.default_rng(num_drafts), 6
    texts = [rng.integers(0, 12, prompt_len + 5).tolist() for _ in range(NUM_SLOTS)]
    state = slots_of(rng, texts, prompt_len)
    logits = rng.normal(size=(NUM_SLOTS, VOCAB_SIZE)).astype(np.float32) * 5
    slots = torch.arange(NUM_SLOTS, dtype=torch.int32)
    positions = state.num_tokens[:-1].long() + num_drafts
    found = change_logits(
        torch.from_numpy(logits).to(device),
        copied(state, device),
        *(each.to(device) for each in (slots, positions)),
    ).cpu()
    changes = []
    for slot in range(1, NUM_SLOTS):
        position = int(positions[slot])
        wanted = changed_row(logits[slot], state, slot, position)
        np.testing.assert_allclose(found[slot].numpy(), wanted, rtol=TOLERANCE, atol=TOLERANCE)
        rules = make_logits_rules(params_of(slot), np.array(texts[slot], np.int32), prompt_len)
        assert rules is not None
        ids = np.array(texts[slot] + state.ids[slot, 1 : 1 + num_drafts].tolist(), np.int32)
        changes.append(row_change(slot, rules, ids, num_drafts, prompt_len, EOS_IDS, None))
    adjustments = prepare_adjustments(changes, {}, torch.from_numpy)
    assert adjustments is not None
    on_host = adjust(torch.from_numpy(logits), adjustments)
    assert found[1:].equal(on_host[1:])
    assert not found[1:].equal(torch.from_numpy(logits[1:]))


def test_no_rows_are_changed_to_none(device: torch.device) -> None:
    state = copied(empty_slots(NUM_SLOTS, VOCAB_SIZE, MAX_DRAFTS, 1, 1, 0, 1, CPU), device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    logits = torch.empty(0, VOCAB_SIZE, device=device)
    assert change_logits(logits, state, none, none.long()).shape == (0, VOCAB_SIZE)
