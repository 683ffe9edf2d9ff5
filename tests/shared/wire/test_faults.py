"""Invalid guides from a peer."""

from typing import Any

import pytest

from shared.wire.faults import MAX_LIST_BYTES, params_fault
from shared.wire.messages import MAX_GRAMMAR_CHARS, Guide, SamplingParams


@pytest.mark.parametrize("name", ["open_ids", "close_ids", "forced_ids"])
def test_ids_of_a_guide_are_the_models(name: str) -> None:
    for token_id, fault in ((99, None), (100, f"guide.{name} has the id 100; the model has 100")):
        ids: dict[str, Any] = {name: [5, token_id]}
        params = SamplingParams(seed=0, guide=Guide(**ids))
        assert params_fault(params, 100) == fault


def test_a_grammar_counts_by_its_bytes() -> None:
    assert params_fault(SamplingParams(seed=0, guide=Guide("a" * MAX_GRAMMAR_CHARS)), 9) is None
    wide = SamplingParams(seed=0, guide=Guide("€" * MAX_GRAMMAR_CHARS))
    assert f"the limit is {MAX_LIST_BYTES}" in str(params_fault(wide, 9))
