"""Two hundred outputs at every depth: equal to those without drafts, by the equality rule."""

import pytest

from benchmarks.equality import DTYPES, METHODS, TEMPERATURES, compare, prompts_of
from tests.services.worker.checkpoints import SETTLED

CLOSE = {"float32": SETTLED, "bfloat16": 0.25}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_two_hundred_texts_match_runs_without_drafts_at_every_depth(
    dtype: str, method: str, temperature: float
) -> None:
    found = compare(prompts_of(200), dtype, method, temperature, [1, 2, 3, 4, 5], 32)
    for each in found.values():
        assert each["right drafts"] > 0
        assert all(gap < CLOSE[dtype] for gap in each["gaps"])
        assert each["same"] >= (0.999 if dtype == "float32" else 0.9) * each["texts"]
