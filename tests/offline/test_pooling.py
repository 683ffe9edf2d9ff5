"""Embeddings, scores and classes, each by a mesh of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.processes import services_of
from shoal import LLM, EmbeddingRequestOutput, PoolingParams
from tests.offline.conftest import SMALL
from tests.pooling_models import save_classifier

TEXTS = ["a fish", "a shoal of fish", "rain"]


@pytest.mark.slow
def test_a_model_that_embeds(tmp_path: Path):
    with LLM(task="embed", runner="pooling", mesh_dir=tmp_path, **SMALL) as llm:
        ids = llm.get_tokenizer().encode(TEXTS[0])
        inputs: list[Any] = [*TEXTS, ids]
        results = llm.embed(inputs)
        assert all(isinstance(each, EmbeddingRequestOutput) for each in results)
        vectors = np.array([each.outputs.embedding for each in results])
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert np.array_equal(vectors[0], vectors[3])
        assert results[0].outputs.hidden_size == vectors.shape[1]
        assert [each.prompt_token_ids for each in results] == [[], [], [], ids]
        [raw] = llm.embed(TEXTS[0], pooling_params=PoolingParams(normalize=False))
        assert abs(np.linalg.norm(raw.outputs.embedding) - 1) > 1e-3
        several: Any = [PoolingParams()] * 3
        with pytest.raises(TypeError, match="pooling_params is a list"):
            llm.embed(TEXTS, pooling_params=several)
        scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS)]
        assert np.allclose(scores, vectors[:3] @ vectors[0], atol=1e-5)
        again = llm.score(TEXTS[:1], TEXTS)
        assert [each.outputs.score for each in again] == scores
        assert scores[0] == pytest.approx(1, abs=1e-5)
        with pytest.raises(ValueError, match="data_1: 2 for 3 prompts"):
            llm.score(TEXTS[:2], TEXTS)
        with pytest.raises(ValueError, match=r"prompts\[0\]: .*classify"):
            llm.classify("a")
        with pytest.raises(ValueError, match="writes no texts"):
            llm.generate("a")


@pytest.mark.slow
def test_a_model_that_classifies(tmp_path: Path):
    save_classifier(tmp_path / "model", num_labels=3)
    with LLM(tmp_path / "model", mesh_dir=tmp_path / "mesh", **SMALL) as llm:
        results = llm.classify(TEXTS)
        assert len(services_of(tmp_path / "mesh")) == 4
    assert not services_of(tmp_path / "mesh")
    with pytest.raises(RuntimeError, match="the LLM is closed"):
        llm.classify("a")
    llm.close()
    for result in results:
        assert result.outputs.num_classes == 3
        assert sum(result.outputs.probs) == pytest.approx(1, abs=1e-5)
        best = int(np.argmax(result.outputs.probs))
        assert result.outputs.label == f"label {best}"
