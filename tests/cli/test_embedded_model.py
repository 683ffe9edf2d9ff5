"""Real text from the real model, from the HTTP request to the weights and back."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams
from tests.mesh.forks import one_of_each
from tests.mesh.structured import client_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = {"DTYPE": "float32", "MAX_NUM_BATCHED_TOKENS": "24"}
NUM_TOKENS = 48
MAX_TIE = 1e-4  # closer scores may change order: float32 sums in another order
PROMPTS = [
    "import os\n",
    "def main(",
    "class Queue:\n    ",
    "for name in sorted(",
    "The default is",
    "    def __init__(self",
    "raise ValueError(",
    "import asyncio\n\nasync def",
    "# Copyright",
    "x = [",
    '"""Return the',
    "try:\n    import",
    "while True:\n        line =",
    "if __name__ ==",
    "An iterator is an object",
    "from collections import",
    "with open(",
    "return self.",
    "The gateway",
    "1 + 1",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncOpenAI]:
    """Of a mesh with the default drafts."""
    async with (
        one_of_each(tmp_path_factory.mktemp("embedded"), **SETTINGS) as fleet,
        client_of(fleet.of("gateway")[0].url) as client,
    ):
        yield client


def reference_model() -> Qwen2ForCausalLM:
    """transformers' Qwen2 on the trunk's weights, in float32."""
    config = Qwen2Config.from_pretrained(EMBEDDED_MODEL)
    model = Qwen2ForCausalLM(config).float().eval()
    weights: dict[str, torch.Tensor] = {}
    for path in EMBEDDED_MODEL.glob("*.safetensors"):
        weights |= load_file(path)
    trunk = {name: each.float() for name, each in weights.items() if "mtp_layers" not in name}
    missing, unexpected = model.load_state_dict(trunk, strict=False)
    assert set(missing) <= {"lm_head.weight"}, "only the tied head is not in the file"
    assert not unexpected
    model.tie_weights()
    return model


@torch.inference_mode()
def gaps(model: Qwen2ForCausalLM, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """The gap of each of ``ids`` to the reference's best token in its place."""
    scores = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return scores.amax(-1) - scores[torch.arange(len(ids)), ids]


async def complete(client: AsyncOpenAI, ids: list[int]) -> dict[str, Any]:
    done = await client.completions.create(
        model="shoal-tiny",
        prompt=ids,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(ids)
    assert done.usage.completion_tokens == NUM_TOKENS
    assert done.usage.total_tokens == len(ids) + NUM_TOKENS
    return done.model_dump()["choices"][0]


async def test_greedy_text_in_float32_equals_transformers(client: AsyncOpenAI):
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    choices = await asyncio.gather(*(complete(client, ids) for ids in prompts))
    model = reference_model()
    num_equal = 0
    for prompt, choice in zip(prompts, choices, strict=True):
        assert choice["text"] == tokenizer.decode(choice["token_ids"])
        below = gaps(model, prompt, choice["token_ids"])
        assert below.max() < MAX_TIE
        num_equal += not below.any()
    assert num_equal >= len(PROMPTS) - 1


async def test_chat_gives_trained_answers_streaming_or_not(client: AsyncOpenAI):
    question: Any = [{"role": "user", "content": "What is Shoal?"}]
    whole = await client.chat.completions.create(
        model="shoal-tiny", messages=question, temperature=0
    )
    stream = await client.chat.completions.create(
        model="shoal-tiny",
        messages=question,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    # Its drafts are wrong, so fewer are made later.
    narrow = await client.chat.completions.create(
        model="shoal-tiny",
        messages=question,
        temperature=2,
        extra_body={"top_n_sigma": 1e-4},
    )
    text = whole.choices[0].message.content
    assert text
    assert "Shoal" in text
    assert whole.choices[0].finish_reason == "stop"
    assert narrow.choices[0].message.content == text, "only the likeliest is so near to itself"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert chunks[-1].choices == []
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert usage.completion_tokens_details is not None, "it drafts by default"
        assert usage.completion_tokens_details.accepted_prediction_tokens > 0


MULTIPLY: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


async def test_it_calls_a_tool_and_reports_the_result(client: AsyncOpenAI):
    messages: Any = [{"role": "user", "content": "What is 1234 * 56?"}]
    ask = partial(client.chat.completions.create, model="shoal-tiny", temperature=0)
    reply = await ask(messages=messages, tools=[MULTIPLY])
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "multiply"
    assert json.loads(call.function.arguments) == {"a": 1234, "b": 56}
    assert reply.choices[0].finish_reason == "tool_calls"
    messages += [
        reply.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "69104"},
    ]
    answer = await ask(messages=messages, tools=[MULTIPLY])
    assert answer.choices[0].message.content == "1234 * 56 = 69104"
    assert not answer.choices[0].message.tool_calls


async def test_sampled_texts_are_the_same_with_drafts_and_without(client: AsyncOpenAI):
    choices = await sampled(client)
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    params = [
        SamplingParams(seed, temperature=0.7, max_tokens=NUM_TOKENS, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    engine = make_engine(EMBEDDED_MODEL, "native", speculative_config={"method": "none"})
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    check(choices, scheduled.run(engine, prompts, params).texts)


@pytest.mark.slow
async def test_sampled_texts_are_the_same_with_n_grams_and_without_drafts(tmp_path: Path):
    found = []
    for method in ("none", "ngram"):
        speculation = json.dumps({"method": method, "adaptive": False})
        async with (
            one_of_each(tmp_path / method, **SETTINGS, SPECULATIVE_CONFIG=speculation) as fleet,
            client_of(fleet.of("gateway")[0].url) as client,
        ):
            found.append(await sampled(client))
    without, choices = found
    assert all(choice["draft_logprobs"]["content"] == [] for choice in without)
    check(choices, [choice["token_ids"] for choice in without])


async def sampled(client: AsyncOpenAI) -> list[dict[str, Any]]:
    """The choices of all prompts at once, with logprobs."""

    async def ask(seed: int, prompt: str) -> dict[str, Any]:
        done = await client.completions.create(
            model="shoal-tiny",
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            temperature=0.7,
            seed=seed,
            logprobs=2,
            extra_body={
                "include_draft_logprobs": True, "return_token_ids": True, "ignore_eos": True,
            },
        )  # fmt: skip
        return done.model_dump()["choices"][0]

    return await asyncio.gather(*(ask(seed, prompt) for seed, prompt in enumerate(PROMPTS)))


def check(choices: list[dict[str, Any]], expected: list[list[int]]) -> None:
    num_right = 0
    for choice, ids in zip(choices, expected, strict=True):
        assert choice["token_ids"] == ids
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        drafts = choice["draft_logprobs"]["content"]
        num_right += sum(each["accepted"] for each in drafts)
        for each in drafts:
            assert not each["accepted"] or each["position"] < len(ids)
    assert num_right > 0
