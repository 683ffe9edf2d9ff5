"""Ranks that share a model with images give the texts of transformers."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.media.checkpoints import save_checkpoint
from tests.media.references import reference
from tests.services.worker.media.prompts import Chat, chat, texts_of
from tests.services.worker.ranks.rank_processes import Case, Texts, texts_of_ranks

LIMITS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 512}


def texts_with_pictures(chats: list[Chat], engine: Any, num_steps: int) -> Texts:
    return Texts(texts_of(engine, chats, chunk_sizes=[13], num_steps=num_steps), np.zeros(0))


@pytest.mark.slow
def test_two_ranks_have_the_texts_of_transformers(tmp_path: Path) -> None:
    """Of ERNIE-4.5-VL, with experts in parts and whole, in native code and by torch."""
    folder, directory = tmp_path / "model", tmp_path / "ranks"
    directory.mkdir()
    save_checkpoint(folder, family="ernie4.5-vl")
    oracle = reference(folder)
    first, second = oracle.picture(1, 3, 5), oracle.picture(2, 7, 2)
    chats = [chat(oracle, "Describe it. ", first), chat(oracle, second, " and ", first, "?")]
    case = partial(Case, folder, texts=partial(texts_with_pictures, chats))
    cases = {
        "parts": case("torch", LIMITS),
        "whole": case("native", LIMITS | {"enable_expert_parallel": True}),
    }
    with texts_of_ranks(cases, 2, directory) as found:
        pass
    for name in cases:
        for texts in found[name]:
            assert texts.ids == [each.expected.ids for each in chats], name
