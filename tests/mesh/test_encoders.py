"""Encoders through the whole mesh: real processes, compared with transformers."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import BertForSequenceClassification, BertModel

from tests.encoder_models import (
    WORDS,
    class_logits,
    embeddings_of,
    save_encoder,
    save_modules,
)
from tests.mesh.test_pooling import ask, serving, vectors_of

TOLERANCE = 1e-5
LENGTH = 96
QUERY = "who leads the shoal"


def texts_of(num: int, longest: int) -> list[str]:
    random = np.random.default_rng(1)
    return [" ".join(random.choice(WORDS, random.integers(1, longest))) for _ in range(num)]


TEXTS = texts_of(512, LENGTH - 2)


def encode(model: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [each.ids for each in tokenizer.encode_batch(texts)]


@pytest.mark.slow
async def test_embeddings_match_transformers_and_outlive_a_worker(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_encoder(model, BertModel)
    save_modules(model, "mean_tokens", "Normalize", max_length=LENGTH)
    expected = embeddings_of(model, encode(model, TEXTS), "mean")
    async with serving(tmp_path / "mesh", model, 2, MAX_NUM_BATCHED_TOKENS="256") as (fleet, url):
        asked = asyncio.create_task(ask(url, "/v1/embeddings", input=TEXTS))
        while not (await fleet.of("scheduler")[0].metrics())["shoal_sequences"]:
            await asyncio.sleep(0.01)
        await fleet.kill(fleet.of("worker")[0])
        reply = await asked
        assert np.abs(np.stack(vectors_of(reply)) - expected).max() < TOLERANCE
        num_tokens = sum(map(len, encode(model, TEXTS)))
        assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        alone = await ask(url, "/v1/embeddings", input=TEXTS[7])
        assert np.abs(vectors_of(alone)[0] - expected[7]).max() < TOLERANCE
        cosines = await ask(url, "/rerank", query=TEXTS[0], documents=TEXTS[1:9], top_n=3)
        order = np.argsort(-(expected[1:9] @ expected[0]))
        assert [each["index"] for each in cosines["results"]] == order[:3].tolist()
        await check_refusals(url)
        await check_model(url)
        metrics = await fleet.of("gateway")[0].metrics()
        assert metrics['shoal_pooled_inputs_total{model_name="m",task="embed"}'] > len(TEXTS)
        await fleet.until_idle()


async def check_refusals(url: str) -> None:
    long = " ".join(["sea"] * (LENGTH + 9))
    error = (await ask(url, "/v1/embeddings", 400, input=["sea", long]))["error"]
    assert error["param"] == "input[1]"
    assert f"the context holds {LENGTH} tokens (max-model-len)" in error["message"]
    exact = await ask(url, "/v1/embeddings", input=" ".join(["sea"] * (LENGTH - 2)))
    assert exact["usage"]["prompt_tokens"] == LENGTH
    cut = await ask(url, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == LENGTH
    for path, body in (
        ("/v1/completions", {"prompt": "sea"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "sea"}]}),
    ):
        error = (await ask(url, path, 400, **body))["error"]
        assert error["code"] == "model_does_not_generate"


async def check_model(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert model["max_model_len"] == LENGTH
    assert model["shoal"]["pooling"]["task"] == "embed"


@pytest.mark.slow
async def test_scores_of_pairs_match_transformers(tmp_path: Path) -> None:
    """The second text has token types of its own, also if it is cut."""
    model = tmp_path / "model"
    save_encoder(model, BertForSequenceClassification, num_labels=1)
    documents = TEXTS[:24]

    def expected(pairs: list[tuple[str, str]], num_kept: int | None = None) -> np.ndarray:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        found = tokenizer.encode_batch(pairs)
        ids, types = [each.ids for each in found], [each.type_ids for each in found]
        if num_kept is not None:
            ids = [[*each[: num_kept - 1], each[-1]] for each in ids]
            types = [[*each[: num_kept - 1], each[-1]] for each in types]
        return sigmoid(class_logits(model, ids, types)[:, 0])

    async with serving(tmp_path / "mesh", model) as (_, url):
        scores = expected([(QUERY, document) for document in documents])
        reply = await ask(url, "/score", text_1=QUERY, text_2=documents)
        found = np.array([each["score"] for each in reply["data"]])
        assert np.abs(found - scores).max() < TOLERANCE
        ranked = await ask(url, "/rerank", query=QUERY, documents=documents)
        order = [each["index"] for each in ranked["results"]]
        assert order == np.argsort(-scores).tolist()
        long: Any = [TEXTS[0] + " sea" * 20]
        cut = await ask(
            *(url, "/score"), text_1=QUERY, text_2=long, truncate_prompt_tokens=12,
            truncation_side="right",
        )  # fmt: skip
        whole = expected([(QUERY, long[0])], 12)
        assert abs(cut["data"][0]["score"] - whole[0]) < TOLERANCE
        marked = await ask(url, "/score", text_1="who </s> leads", text_2="sea")
        (score,) = expected([("who </s> leads", "sea")])
        assert abs(marked["data"][0]["score"] - score) < TOLERANCE


def sigmoid(x: np.ndarray) -> np.ndarray:
    scores: np.ndarray = 1 / (1 + np.exp(-x))
    return scores
