"""The server's counts of a trained MoE's drafts, compared with plain torch."""

from pathlib import Path

import pytest

from benchmarks.acceptance import SAMPLING
from benchmarks.moe_acceptance import measure

ROUNDING = 1e-3  # largest difference of a score between two computations


@pytest.mark.slow
def test_the_server_accepts_the_drafts_that_plain_torch_finds_right(tmp_path: Path) -> None:
    """After seconds of training some drafts are right and others wrong."""
    found = measure(tmp_path, num_steps=80, num_prompts=12, max_tokens=48)
    for kind in SAMPLING:
        facts = found[kind]
        assert facts["by the metrics"] == facts["by the answers"]
        assert all(each < ROUNDING for each in facts["margins"])
        assert facts["chains that differ"] <= 2
        if not facts["margins"]:
            assert facts["by the answers"] == facts["by plain torch"]
        right, num = facts["by the metrics"]["right at 0"], facts["by the metrics"]["chains"]
        assert 0.05 < right / num < 0.95
