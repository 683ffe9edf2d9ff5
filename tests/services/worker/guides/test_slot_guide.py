"""Allowed next ids, without an engine: masks are a function of the guide and the ids."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import grammar_from

from services.worker.guides.grammars import (
    MAX_STALL_S,
    Compiled,
    GrammarError,
    Grammars,
    Progress,
)
from services.worker.guides.guides import Guides, SlotGuide
from services.worker.slots.guide import NotCompiled
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import Guide, SamplingParams
from tests.services.worker.grammars import GRAMMARS, encode

VOCAB_SIZE = 8192
EOS_IDS = np.array([2, 0])
OPEN, CLOSE = 1, 300


@cache
def guides() -> Guides:
    return Guides(EMBEDDED_MODEL, VOCAB_SIZE, EOS_IDS)


def begin(
    guide: Guide, emitted: list[int] | None = None, among: Guides | None = None, **params: Any
) -> SlotGuide:
    """Waits for its grammar."""
    among = among or guides()
    asked = SamplingParams(seed=0, guide=guide, **params)
    found = among.begin(asked, np.array(emitted or [], np.int32))
    assert found is not None
    if guide.grammar:
        among.grammars.compile(guide.grammar).future.exception()
    return found


@contextmanager
def held(grammars: Grammars) -> Iterator[None]:
    """Unknown grammars are compiled afterwards."""
    may_go_on = threading.Event()
    grammars._thread.submit(may_go_on.wait)
    try:
        yield
    finally:
        may_go_on.set()


def allowed(mask: np.ndarray | None) -> list[int] | None:
    if mask is None:
        return None
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(guide: Guide, seed: int, max_len: int = 40) -> list[int]:
    """Random allowed ids, up to the end of the output."""
    rng, slot_guide = random.Random(seed), begin(guide)
    ids: list[int] = []
    while len(ids) < max_len and not set(ids) & set(EOS_IDS.tolist()):
        may = allowed(slot_guide.mask([]))
        ids.append(rng.choice(may if may is not None else [5, 9, CLOSE]))
        slot_guide.note([ids[-1]])
    return ids


REASONING: dict[str, Any] = {"is_open": True, "close_ids": [CLOSE]}
GATES: dict[str, dict[str, Any]] = {
    "none": {},
    "open": REASONING,
    "budget": {**REASONING, "budget": 5, "forced_ids": [7, 8, CLOSE]},
    "undecided": {"open_ids": [OPEN], "close_ids": [CLOSE], "budget": 2, "forced_ids": [CLOSE]},
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("grammar", ["", *GRAMMARS])
def test_masks_with_drafts_and_after_readmission_match_one_id_after_another(
    grammar: str, gate: str
) -> None:
    guide = Guide(GRAMMARS.get(grammar, ""), **GATES[gate])
    for seed in range(4):
        ids = walk(guide, seed)
        rng, carried, num = random.Random(seed), begin(guide), 0
        while num < len(ids):
            drafts = ids[num : num + rng.randint(1, 6)]
            for num_drafts in range(len(drafts) + 1):
                found = allowed(carried.mask(drafts[:num_drafts]))
                assert found == allowed(begin(guide, ids[: num + num_drafts]).mask([]))
            num_kept = rng.randint(1, len(drafts))
            carried.note(drafts[:num_kept])
            num += num_kept


@pytest.mark.parametrize("gate", GATES)
def test_forced_ids_are_allowed_and_choices_are_never_forced(gate: str) -> None:
    num_forced = 0
    for grammar in GRAMMARS.values():
        guide = Guide(grammar, **GATES[gate])
        for seed in range(3):
            ids = walk(guide, seed)
            for num in range(len(ids)):
                slot_guide = begin(guide, ids[:num])
                forced = slot_guide.forced()
                num_forced += len(forced)
                for index, token_id in enumerate(forced):
                    assert token_id in allowed(slot_guide.mask(forced[:index]))
    assert num_forced > 0 or gate == "open", "chance finds no end of reasoning there"


def test_a_wrong_draft_changes_nothing() -> None:
    guide = Guide(GRAMMARS["schema"])
    for seed in range(4):
        ids = walk(guide, seed)
        slot_guide = begin(guide)
        for num, token_id in enumerate(ids):
            slot_guide.mask([token_id, 4000, 5])
            slot_guide.mask([3999, token_id])
            assert allowed(slot_guide.mask([])) == allowed(begin(guide, ids[:num]).mask([]))
            slot_guide.note([token_id])


def test_a_complete_text_admits_only_its_ends() -> None:
    slot_guide = begin(Guide(GRAMMARS["choice"]), encode("nothing at all"), stop_token_ids=[77])
    for _ in range(3):  # as with ignore_eos
        mask = slot_guide.mask([])
        assert allowed(mask) == [0, 2, 77]
        assert slot_guide.leaves_ends_only(mask)
        slot_guide.note([2])
    assert not slot_guide.leaves_ends_only(begin(Guide(GRAMMARS["choice"])).mask([]))


def test_ids_that_the_tokenizer_does_not_have_are_hidden() -> None:
    wide = Guides(EMBEDDED_MODEL, VOCAB_SIZE + 100, EOS_IDS)
    found = begin(Guide("start: /(.|\\n)*/"), among=wide)
    assert max(allowed(found.mask([]))) < VOCAB_SIZE


def test_where_the_tokenizer_has_more_ids_than_the_model_these_are_hidden() -> None:
    """The difference is not a multiple of a mask's word or byte."""
    narrow = Guides(EMBEDDED_MODEL, 8101, EOS_IDS)
    every = begin(Guide("start: /(.|\\n)*/"))
    found = begin(Guide("start: /(.|\\n)*/"), among=narrow)
    assert found.error is None
    assert allowed(found.mask([])) == [each for each in allowed(every.mask([])) if each < 8101]
    assert found.mask([]).shape == (254,)
    opens = begin(Guide(GRAMMARS["choice"], open_ids=[OPEN, 8150], close_ids=[8149]), among=narrow)
    assert OPEN in allowed(opens.mask([]))
    assert max(allowed(opens.mask([]))) < 8101


def test_a_close_id_among_the_drafts_wakes_the_grammar_for_the_next_position() -> None:
    slot_guide = begin(Guide(GRAMMARS["choice"], **REASONING))
    assert set(range(VOCAB_SIZE)) - set(allowed(slot_guide.mask([5, 6]))) == {0, 2}
    begins = allowed(begin(Guide(GRAMMARS["choice"])).mask([]))
    assert allowed(slot_guide.mask([5, 6, CLOSE])) == begins
    assert allowed(slot_guide.mask([CLOSE, *encode("no")])) != begins


def test_the_first_token_decides_whether_there_is_reasoning() -> None:
    guide = Guide(GRAMMARS["choice"], open_ids=[OPEN], close_ids=[CLOSE])
    begins = allowed(begin(Guide(GRAMMARS["choice"])).mask([]))
    assert allowed(begin(guide).mask([])) == sorted([*begins, OPEN])
    assert CLOSE in allowed(begin(guide).mask([OPEN]))
    assert allowed(begin(guide).mask([OPEN, 9, CLOSE])) == begins
    assert OPEN not in allowed(begin(guide, encode("n")).mask([]))


@pytest.mark.parametrize("grammar", ["", GRAMMARS["choice"]])
def test_after_the_budget_forced_ids_follow_one_by_one(grammar: str) -> None:
    begins = allowed(begin(Guide(grammar)).mask([]))
    for budget in range(3):
        guide = Guide(grammar, **REASONING, budget=budget, forced_ids=[7, CLOSE, 8])
        text = [20] * budget
        for num, expected in ((0, [7]), (1, [CLOSE]), (2, begins)):
            ids = [*text, 7, CLOSE][: budget + num]
            assert allowed(begin(guide).mask(ids)) == expected
            assert allowed(begin(guide, ids).mask([])) == expected
        if budget:
            assert allowed(begin(guide, [CLOSE]).mask([])) == begins, "it ended before"


def test_forced_ids_end_reasoning_without_a_close_id_too() -> None:
    guide = Guide(GRAMMARS["choice"], **REASONING, budget=1, forced_ids=[7])
    begins = allowed(begin(Guide(GRAMMARS["choice"])).mask([]))
    assert allowed(begin(guide, [20, 7]).mask([])) == begins
    bare = Guide(GRAMMARS["choice"], **REASONING, budget=1)
    assert allowed(begin(bare, [20]).mask([])) == begins


@pytest.mark.parametrize(
    ("grammar", "emitted", "error"),
    [
        ("start: nowhere", "", "its grammar is none"),
        ("", "", ""),
        (grammar_from("json_schema", '{"$ref": "#"}'), "", "too complex"),
        ("start: " + " | ".join(f'"{i}"' for i in range(3000)), "12", "too complex"),
        (GRAMMARS["choice"], "neither", "left its grammar"),
    ],
)
def test_a_stuck_grammar_has_an_error_and_hides_every_id(
    grammar: str, emitted: str, error: str
) -> None:
    slot_guide = begin(Guide(grammar), encode(emitted))
    mask = slot_guide.mask([])
    if not error:
        assert mask is None
        assert slot_guide.error is None
        return
    assert allowed(mask) == []
    assert error in slot_guide.error
    assert slot_guide.is_too_complex == (error == "too complex")
    assert "\n" not in slot_guide.error


def test_rules_that_nest_deeply_compile_without_harm() -> None:
    chain = [f"r{number}: r{number + 1}" for number in range(20_000)]
    slot_guide = begin(Guide("\n".join(["start: r0", *chain, 'r20000: "a"'])))
    assert allowed(slot_guide.mask([])) or slot_guide.error


def test_while_a_grammar_is_not_compiled_its_masks_are_missing_and_all_others_there() -> None:
    slow = Guides(EMBEDDED_MODEL, VOCAB_SIZE, EOS_IDS)
    with held(slow.grammars):
        asked = SamplingParams(seed=0, guide=Guide(GRAMMARS["choice"], **REASONING))
        slot_guide = slow.begin(asked, EOS_IDS[:0])
        assert slot_guide.awaited is None
        assert slot_guide.mask([5]) is not None
        with pytest.raises(NotCompiled):
            slot_guide.mask([CLOSE])
        slot_guide.note([CLOSE])
        awaited = slot_guide.awaited
        assert awaited is not None
        assert slot_guide.forced() == []
        with pytest.raises(NotCompiled):
            slot_guide.mask([])
    assert awaited.exception() is None
    begins = allowed(begin(Guide(GRAMMARS["choice"])).mask([]))
    assert allowed(slot_guide.mask([])) == begins
    assert slot_guide.awaited is None


def test_a_moving_queue_of_grammars_may_be_slow_and_a_stalled_one_fails() -> None:
    long_ago, now = time.monotonic() - 2 * MAX_STALL_S, time.monotonic()
    moves, stands = Progress(), Progress()
    moves.last_s, stands.last_s = now, long_ago
    for compiled in (Compiled(Future(), long_ago, moves), Compiled(Future(), now, stands)):
        with pytest.raises(NotCompiled):
            compiled.start()
    with pytest.raises(GrammarError, match="did not compile within 60 s"):
        Compiled(Future(), long_ago, stands).start()


def test_a_folder_without_a_tokenizer_fails_guided_sequences_alone(tmp_path) -> None:
    bare = Guides(tmp_path, VOCAB_SIZE, EOS_IDS)
    slot_guide = begin(Guide(GRAMMARS["choice"]), among=bare)
    assert allowed(slot_guide.mask([])) == []
    assert "tokenizer.json" in slot_guide.error
    assert bare.begin(SamplingParams(seed=0), EOS_IDS[:0]) is None


def test_nothing_is_forced_that_the_model_lacks() -> None:
    """A tokenizer may know more ids than the model has."""
    text = "What does the scheduler do?"
    few = Guides(EMBEDDED_MODEL, max(encode(text)), EOS_IDS)
    guide = Guide(grammar=grammar_from("regex", text.replace("?", "[?]")))
    all_ids, forced = begin(guide).forced(), begin(guide, among=few).forced()
    assert max(all_ids) >= max(encode(text))
    assert forced == all_ids[: all_ids.index(max(all_ids))]
