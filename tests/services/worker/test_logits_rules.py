"""A request's logits rules against plain loops."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.slots.logits_rules import make_logits_rules, row_change
from shared.wire.messages import SamplingParams

EOS_IDS = np.array([2, 5])
IDS = st.integers(0, 6)  # so few that words match and ids repeat
LISTS = st.lists(IDS, max_size=8)
PENALTIES = st.sampled_from([0.0, -0.5, 1.25])
PARAMS = st.builds(
    SamplingParams,
    seed=st.just(0),
    ignore_eos=st.booleans(),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_tokens=st.integers(0, 6),
    stop_token_ids=LISTS,
    allowed_token_ids=LISTS,
    logit_bias=st.dictionaries(IDS, st.integers(-9, 9).map(float)).map(lambda x: list(x.items())),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=4), max_size=5),
)


def hidden_of(params: SamplingParams, output: list[int]) -> set[int]:
    hidden = set()
    for *start, end in params.bad_words:
        if len(start) <= len(output) and output[len(output) - len(start) :] == start:
            hidden.add(end)
    if len(output) < params.min_tokens:
        hidden |= set(params.stop_token_ids) | set(EOS_IDS.tolist())
    return hidden


@given(PARAMS, st.lists(IDS, min_size=1, max_size=12), st.data())
def test_a_row_has_the_rules_of_its_request(
    params: SamplingParams, ids: list[int], data: st.DataObject
) -> None:
    prompt_len = data.draw(st.integers(1, len(ids)))
    num_admitted = data.draw(st.integers(prompt_len, len(ids)))
    num_drafts = data.draw(st.integers(0, len(ids) - num_admitted))
    rules = make_logits_rules(params, np.array(ids[:num_admitted], np.int32), prompt_len)
    if rules is None:
        assert params == SamplingParams(
            seed=0, ignore_eos=params.ignore_eos, stop_token_ids=params.stop_token_ids
        )
        return
    rules.note(ids[num_admitted : len(ids) - num_drafts])
    change = row_change(3, rules, np.array(ids, np.int32), num_drafts, prompt_len, EOS_IDS, None)
    output = ids[prompt_len:]
    assert change.row == 3
    assert change.allowed.tolist() == sorted(set(params.allowed_token_ids))
    assert set(change.hidden.tolist()) == hidden_of(params, output)
    assert dict(zip(change.biased.tolist(), change.biases.tolist(), strict=True)) == dict(
        params.logit_bias
    )
    is_penalized = params.presence_penalty or params.frequency_penalty
    counts = zip(change.emitted.tolist(), change.num_emitted.tolist(), strict=True)
    assert dict(counts) == (Counter(output) if is_penalized else {})
    assert sorted(change.known.tolist()) == (
        sorted(set(ids)) if params.repetition_penalty != 1 else []
    )
    assert change.repetition_penalty == params.repetition_penalty
    assert change.presence_penalty == params.presence_penalty
    assert change.frequency_penalty == params.frequency_penalty
