"""Models with gated delta layers against transformers: logits, whole, in chunks and token by
token."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.harness.oracle import true_logits
from tests.services.worker.checkpoints import VOCAB_SIZE, asked_once, oracle_of
from tests.services.worker.hybrids import HYBRIDS, Row, Sequences, load, save_hybrid
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES, Checkpoint

LENGTHS = [97, 3, 1, 70]  # longer than a chunk of the delta rule
FEW = [31, 3, 1, 22]  # of prompts in small chunks
NUM_DECODED = 6
CHUNK_SIZES = (1, 7, 64, 1000)
# Of each kind of state a prompt in one piece; all models in chunks of 7, and token by token.
KINDS = ("qwen3-next", "kimi", "granite 4, rope, two groups", "ling 2.5")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_hybrid(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return asked_once(oracle_of(folder))


@pytest.mark.parametrize(
    ("folder", "chunk_size"),
    [
        pytest.param(
            name,
            size,
            marks=() if size == 7 or (size == 1000 and name in KINDS) else pytest.mark.slow,
        )
        for name in HYBRIDS
        for size in CHUNK_SIZES
    ],
    indirect=["folder"],
    scope="module",
)
def test_logits_match_transformers(folder: Path, oracle: PreTrainedModel, chunk_size: int) -> None:
    """Prompts in chunks, side by side, and then single tokens."""
    rng, lengths = np.random.default_rng(3), LENGTHS if chunk_size >= 64 else FEW
    texts = [rng.integers(8, VOCAB_SIZE, num + NUM_DECODED).tolist() for num in lengths]
    found: list[list[np.ndarray]] = [[] for _ in texts]
    sequences = Sequences(load(folder), len(texts))
    while any(sum(map(len, parts)) < len(text) for parts, text in zip(found, texts, strict=True)):
        rows = []
        for number, (text, prompt_len) in enumerate(zip(texts, lengths, strict=True)):
            start = sum(map(len, found[number]))
            end = min(start + chunk_size, prompt_len) if start < prompt_len else start + 1
            if ids := text[start:end]:
                rows.append(Row(number, ids))
        for row, logits in zip(rows, sequences.step(rows), strict=True):
            found[row.sequence].append(logits)
    for text, parts in zip(texts, found, strict=True):
        expected = true_logits(oracle, text)
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_drafts_match_plain_torch(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    checkpoint = Checkpoint(HYBRID_FAMILIES[name], tmp_path)
    ids = np.random.default_rng(5).integers(8, VOCAB_SIZE, 23).tolist()
    drafts = [9, 31, 80]
    found = Sequences(load(tmp_path), 1).draft_logits(ids, drafts)
    torch.testing.assert_close(found, checkpoint.draft_logits(ids, drafts), atol=1e-4, rtol=1e-4)
