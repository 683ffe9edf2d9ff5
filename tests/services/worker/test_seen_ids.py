from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.slots.logits_rules import SeenIds

IDS = st.lists(st.integers(0, 60), max_size=200)


@given(IDS, IDS)
def test_ids_at_once_and_one_by_one_are_counted(first: list[int], later: list[int]) -> None:
    seen = SeenIds(np.array(first, np.int32))
    for token_id in later:
        seen.add(token_id)
    assert dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True)) == Counter(first + later)
