"""Embeddings, scores and classes through the whole mesh: real processes and Shoal's own models."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError

from benchmarks.harness.fleet import Fleet, running_fleet
from shared.model_folder import EMBEDDED_MODEL
from tests.mesh.forks import fork
from tests.mesh.mesh import running_mesh
from tests.pooling_models import (
    NO,
    YES,
    class_logits,
    normalized,
    pooled,
    read_tokenizer,
    save_classifier,
    save_embedder,
    save_reranker,
    states_of,
    yes_probabilities,
)

TOLERANCE = 1e-5
WORDS = ["the", "shoal", "turns", "as", "one", "and", "no", "fish", "gives", "the", "order", "but"]
TEXTS = [" ".join(WORDS[: 1 + number % len(WORDS)]) + f" {number}" for number in range(24)]
NUM_INPUTS = 2048
PAIR_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
TASK = "Given a web search query, retrieve relevant passages that answer the query"


@asynccontextmanager
async def serving(
    directory: Path, model: Path, num_workers: int = 1, **settings: Any
) -> AsyncIterator[tuple[Fleet, str]]:
    directory.mkdir(exist_ok=True)
    common = {"MODEL": str(model), "SERVED_MODEL_NAME": "m", "DTYPE": "float32", **settings}
    async with running_fleet(directory, common, fork) as fleet:
        await fleet.start_all(scheduler=1, tokenizer=1, worker=num_workers, gateway=1)
        yield fleet, fleet.of("gateway")[0].url


async def ask(url: str, path: str, status: int = 200, **body: Any) -> Any:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        reply = await response.json()
        assert response.status == status, reply
        return reply


def vectors_of(reply: Any) -> list[np.ndarray]:
    assert [each["index"] for each in reply["data"]] == list(range(len(reply["data"])))
    return [np.array(each["embedding"], np.float32) for each in reply["data"]]


def truth(folder: Path, texts: list[str], mode: str = "lasttoken") -> np.ndarray:
    tokenizer = read_tokenizer(folder)
    states = states_of(folder, [tokenizer.encode(text).ids for text in texts])
    return np.stack([normalized(pooled(state, mode)) for state in states])


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    save_embedder(folder, is_matryoshka=True)
    return folder


async def test_embeddings_match_transformers_and_refusals_name_the_field(
    tmp_path: Path, embedder: Path
) -> None:
    expected = truth(embedder, TEXTS)
    async with serving(tmp_path / "mesh", embedder) as (fleet, url):
        reply = await ask(url, "/v1/embeddings", model="m", input=TEXTS, user="u")
        assert np.abs(np.stack(vectors_of(reply)) - expected).max() < TOLERANCE
        num_tokens = sum(len(ids) for ids in ids_of(embedder, TEXTS))
        assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert (reply["object"], reply["model"]) == ("list", "m")
        await check_single_inputs(url, embedder, reply)
        await check_openai_client(url, expected)
        await check_shorter_ones(url, embedder, expected)
        await check_raw_pooling(url, expected)
        await check_cosines(url, expected)
        await check_refusals(url)
        await check_models_and_metrics(fleet, url)
        await fleet.until_idle()


def ids_of(folder: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = read_tokenizer(folder)
    return [tokenizer.encode(text).ids for text in texts]


async def check_single_inputs(url: str, folder: Path, batch: Any) -> None:
    """Equal bits, for a text and for its ids."""
    for text, ids, each in zip(TEXTS[:4], ids_of(folder, TEXTS), batch["data"], strict=False):
        for given in (text, [text], ids, [ids]):
            (alone,) = (await ask(url, "/v1/embeddings", input=given))["data"]
            assert alone["embedding"] == each["embedding"]


async def check_openai_client(url: str, expected: np.ndarray) -> None:
    """It requests base64."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        reply = await client.embeddings.create(model="m", input=TEXTS)
        found = np.array([each.embedding for each in reply.data])
        assert np.abs(found - expected).max() < TOLERANCE
        floats = await client.embeddings.create(model="m", input=TEXTS, encoding_format="float")
        assert np.array([each.embedding for each in floats.data]).tolist() == found.tolist()
        with pytest.raises(BadRequestError, match="pools"):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi"}]
            )
        with pytest.raises(BadRequestError, match="/v1/embeddings"):
            await client.completions.create(model="m", prompt="Hi")


async def check_shorter_ones(url: str, folder: Path, expected: np.ndarray) -> None:
    reply = await ask(url, "/v1/embeddings", input=TEXTS, dimensions=16)
    unit = np.stack([normalized(each[:16]) for each in expected])
    assert np.abs(np.stack(vectors_of(reply)) - unit).max() < TOLERANCE
    reply = await ask(url, "/v1/embeddings", input=TEXTS[1], normalize=False)
    (state,) = states_of(folder, ids_of(folder, TEXTS[1:2]))
    assert np.abs(vectors_of(reply)[0] - state[-1].numpy()).max() < 10 * TOLERANCE
    reply = await ask(url, "/v1/embeddings", input=TEXTS[9], truncate_prompt_tokens=4)
    *start, end = ids_of(folder, TEXTS[9:10])[0]
    cut = await ask(url, "/v1/embeddings", input=[*start[:3], end])
    assert reply["data"] == cut["data"]
    assert reply["usage"]["prompt_tokens"] == 4
    plain = await ask(url, "/v1/embeddings", input=TEXTS[9], add_special_tokens=False)
    assert plain["data"] == (await ask(url, "/v1/embeddings", input=start))["data"]


async def check_raw_pooling(url: str, expected: np.ndarray) -> None:
    reply = await ask(url, "/pooling", input=TEXTS[:2], encoding_format="base64")
    found = [np.frombuffer(base64.b64decode(each["data"]), "<f4") for each in reply["data"]]
    assert np.abs(np.stack(found) - expected[:2]).max() < TOLERANCE
    assert {each["object"] for each in reply["data"]} == {"pooling"}


async def check_cosines(url: str, expected: np.ndarray) -> None:
    reply = await ask(url, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:6])
    found = [each["score"] for each in reply["data"]]
    assert np.abs(np.array(found) - expected[1:6] @ expected[0]).max() < TOLERANCE
    reply = await ask(url, "/rerank", query=TEXTS[0], documents=TEXTS[1:], top_n=5)
    cosines = expected[1:] @ expected[0]
    assert [each["index"] for each in reply["results"]] == np.argsort(-cosines)[:5].tolist()


async def check_refusals(url: str) -> None:
    long = " ".join(WORDS * 30)
    for path, body, param, text in (
        ("/v1/embeddings", {"input": ["ok", long]}, "input[1]", "the prompt has"),
        ("/v1/embeddings", {"input": []}, "input", "expected array of length >= 1"),
        ("/v1/embeddings", {"input": ["ok", ""]}, "input[1]", "length >= 1"),
        ("/v1/embeddings", {"input": ["ok", [1]]}, "input[1]", "as all others are"),
        ("/v1/embeddings", {"input": [[1, 99999]]}, "input[0][1]", "token ids are below 8224"),
        ("/v1/embeddings", {}, "input", "is required"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "the limit is 2048"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "have 64"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ("/v1/embeddings", {"input": "a", "messages": [1]}, "messages", "not supported"),
        ("/v1/embeddings", {"input": "a", "priority": -1}, "priority", "max-priority-boost"),
        ("/pooling", {"input": "a", "task": "classify"}, "model", "gives embeddings"),
        ("/classify", {"input": "a"}, "model", "gives embeddings"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1", "as many of both"),
        ("/score", {"text_1": "a"}, "text_2", "is required"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]", "expected str"),
        ("/rerank", {"query": "a", "documents": ["ok", long]}, "documents[1]", "max-model-len"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction", "put"),
    ):
        error = (await ask(url, path, 400, **body))["error"]
        assert error["param"] == param, error
        assert text in error["message"], error
    error = (await ask(url, "/v1/embeddings", 400, input=["ok", long]))["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("input[1]: the context holds 128 tokens (max-model-len)")
    assert (await ask(url, "/v1/embeddings", 404, model="other", input="a"))["error"]


async def check_models_and_metrics(fleet: Fleet, url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert model["shoal"]["pooling"]["task"] == "embed"
    assert model["shoal"]["pooling"]["size"] == 64
    before = await fleet.of("gateway")[0].metrics()
    reply = await ask(url, "/v1/embeddings", input=TEXTS)
    after = await fleet.of("gateway")[0].metrics()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown('shoal_pooled_inputs_total{model_name="m",task="embed"}') == len(TEXTS)
    assert grown('vllm:prompt_tokens_total{model_name="m"}') == reply["usage"]["prompt_tokens"]
    assert not after.get('vllm:generation_tokens_total{model_name="m"}')


@pytest.mark.slow
async def test_2048_inputs_take_turns_and_outlive_a_worker(tmp_path: Path, embedder: Path) -> None:
    """They do not delay a client of one text, and a kill -9 in the middle changes nothing."""
    inputs = [f"{TEXTS[number % len(TEXTS)]} {number}" for number in range(NUM_INPUTS)]
    sample = [0, 1, 777, 2047]
    settings = {"MAX_WAITING": "300", "MAX_NUM_SEQS": "16", "MAX_NUM_BATCHED_TOKENS": "128"}
    async with serving(tmp_path / "mesh", embedder, 2, **settings) as (fleet, url):
        undisturbed = await ask(url, "/v1/embeddings", input=inputs)
        assert len(undisturbed["data"]) == NUM_INPUTS
        asked = asyncio.create_task(ask(url, "/v1/embeddings", input=inputs))
        scheduler = fleet.of("scheduler")[0]
        while not (await scheduler.metrics())["shoal_sequences"]:
            await asyncio.sleep(0.01)
        assert (await scheduler.metrics())["shoal_sequences"] <= 256
        await fleet.kill(fleet.of("worker")[0])
        (other,) = (await ask(url, "/v1/embeddings", input=TEXTS[0]))["data"]
        assert not asked.done(), "the text alone has waited for all the others"
        assert len(other["embedding"]) == 64
        disturbed = await asked
        assert disturbed == undisturbed | {key: disturbed[key] for key in ("id", "created")}
        for number in sample:
            (alone,) = (await ask(url, "/v1/embeddings", input=inputs[number]))["data"]
            assert alone["embedding"] == undisturbed["data"][number]["embedding"]
        await fleet.until_idle()
    expected = truth(embedder, [inputs[number] for number in sample])
    found = np.stack([vectors_of(undisturbed)[number] for number in sample])
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.slow
async def test_means_match_transformers_in_chunks(tmp_path: Path) -> None:
    save_embedder(tmp_path / "model", "mean_tokens")
    expected = truth(tmp_path / "model", TEXTS, "mean_tokens")
    settings: dict[str, Any] = {"MAX_NUM_BATCHED_TOKENS": "7", "MAX_NUM_SEQS": "3"}
    async with serving(tmp_path / "mesh", tmp_path / "model", **settings) as (_, url):
        for _ in range(2):  # nothing is cached
            reply = await ask(url, "/v1/embeddings", input=TEXTS)
            assert np.abs(np.stack(vectors_of(reply)) - expected).max() < TOLERANCE
        error = (await ask(url, "/v1/embeddings", 400, input="a", dimensions=8))["error"]
        assert "is_matryoshka in pooler-config" in error["message"]


@pytest.mark.slow
async def test_a_reranker_scores_as_its_card_says(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_reranker(model, max_position_embeddings=256)
    settings: dict[str, Any] = {"POOLER_CONFIG": f'{{"classifier_from_token": ["{NO}", "{YES}"]}}'}

    def expected(query: str, documents: list[str], task: str = TASK) -> np.ndarray:
        texts = [PAIR_PROMPT.format(task, query, document) for document in documents]
        tokenizer = read_tokenizer(model)
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return yes_probabilities(model, ids)

    async with serving(tmp_path / "mesh", model, **settings) as (_, url):
        reply = await ask(url, "/score", text_1="who leads?", text_2=TEXTS)
        found = np.array([each["score"] for each in reply["data"]])
        scores = expected("who leads?", TEXTS)
        assert np.abs(found - scores).max() < TOLERANCE
        pairs = await ask(url, "/v1/score", queries=TEXTS[:2], documents=TEXTS[2:4])
        alone = [expected(*each)[0] for each in ((TEXTS[0], [TEXTS[2]]), (TEXTS[1], [TEXTS[3]]))]
        assert np.abs(np.array([each["score"] for each in pairs["data"]]) - alone).max() < TOLERANCE
        documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            ranked = await ask(url, path, model="m", query="who leads?", documents=documents)
            order = np.argsort(-scores)
            assert [each["index"] for each in ranked["results"]] == order.tolist()
            assert [each["document"]["text"] for each in ranked["results"]] == [
                TEXTS[index] for index in order
            ]
            found = np.array([each["relevance_score"] for each in ranked["results"]])
            assert np.abs(found - scores[order]).max() < TOLERANCE
        short = await ask(
            *(url, "/rerank"), query="q", documents=TEXTS, top_n=2, return_documents=False,
            instruction="Find the number.",
        )  # fmt: skip
        scores = expected("q", TEXTS, "Find the number.")
        assert [each["index"] for each in short["results"]] == np.argsort(-scores)[:2].tolist()
        assert "document" not in short["results"][0]
        error = (await ask(url, "/v1/embeddings", 400, input="a"))["error"]
        assert "gives classes or scores" in error["message"]


@pytest.mark.slow
async def test_classes_have_labels_and_probabilities(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_classifier(model, 3)
    ids = [read_tokenizer(model).encode(text).ids for text in TEXTS]
    logits = class_logits(model, ids)
    async with serving(tmp_path / "mesh", model) as (_, url):
        reply = await ask(url, "/classify", input=TEXTS)
        for each, row in zip(reply["data"], logits, strict=True):
            probs = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            assert np.abs(np.array(each["probs"]) - probs).max() < TOLERANCE
            assert each["label"] == f"label {row.argmax()}"
            assert each["num_classes"] == 3
        raw = await ask(url, "/pooling", input=TEXTS[0], task="classify", use_activation=False)
        assert np.abs(np.array(raw["data"][0]["data"]) - logits[0]).max() < 10 * TOLERANCE
        error = (await ask(url, "/score", 400, text_1="a", text_2="b"))["error"]
        assert "has 3 classes (/classify)" in error["message"]


async def test_a_model_of_texts_names_the_setting_that_makes_it_pool(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/pooling", {"input": "a"}),
            ("/classify", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/v2/rerank", {"query": "a", "documents": ["b"]}),
        ):
            error = (await ask(mesh.url(), path, 400, **body))["error"]
            assert "--runner pooling" in error["message"]
            assert error["code"] == "model_does_not_pool"


@pytest.mark.slow
async def test_any_decoder_pools_with_the_runner(tmp_path: Path) -> None:
    """The embedded model, with its MTP head."""
    async with serving(tmp_path / "mesh", EMBEDDED_MODEL, RUNNER="pooling") as (_, url):
        reply = await ask(url, "/v1/embeddings", input=["one", "two"])
        first, second = vectors_of(reply)
        assert np.isclose([np.linalg.norm(first), np.linalg.norm(second)], 1).all()
        assert np.dot(first, second) < 0.999
