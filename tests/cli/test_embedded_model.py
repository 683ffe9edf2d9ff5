"""Real text from the real model, from the HTTP request to the weights and back."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.fleet import running_fleet
from shared.model_folder import EMBEDDED_MODEL
from tests.cli.serving import serving
from tests.mesh.forks import fork

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


async def test_greedy_text_in_float32_equals_transformers(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "24")
    async with serving(tmp_path, *flags) as shoal:
        await shoal.until_ready()
        async with AsyncOpenAI(base_url=f"{shoal.url}/v1", api_key="none") as client:
            choices = await asyncio.gather(*(complete(client, ids) for ids in prompts))
    model = reference_model()
    num_equal = 0
    for prompt, choice in zip(prompts, choices, strict=True):
        assert choice["text"] == tokenizer.decode(choice["token_ids"])
        below = gaps(model, prompt, choice["token_ids"])
        assert below.max() < MAX_TIE
        num_equal += not below.any()
    assert num_equal >= len(PROMPTS) - 1


async def test_chat_answers_what_it_was_taught_streaming_or_not(tmp_path: Path):
    question: Any = [{"role": "user", "content": "What is Shoal?"}]
    async with serving(tmp_path, "--num-threads", "2") as shoal:
        await shoal.until_ready()
        async with AsyncOpenAI(base_url=f"{shoal.url}/v1", api_key="none") as client:
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


async def test_it_calls_a_tool_and_says_what_that_returned(tmp_path: Path):
    messages: Any = [{"role": "user", "content": "What is 1234 * 56?"}]
    async with running_fleet(tmp_path, {"DTYPE": "float32", "NUM_THREADS": "1"}, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        url = f"{fleet.of('gateway')[0].url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
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


@pytest.mark.parametrize("method", ["mtp", pytest.param("ngram", marks=pytest.mark.slow)])
async def test_texts_over_http_are_the_same_with_drafts_and_without(tmp_path: Path, method: str):
    """Sampled, with logprobs, 20 at once."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]

    async def ask(client: AsyncOpenAI, seed: int, ids: list[int]) -> dict[str, Any]:
        done = await client.completions.create(
            model="shoal-tiny",
            prompt=ids,
            max_tokens=NUM_TOKENS,
            temperature=0.7,
            seed=seed,
            logprobs=2,
            extra_body={"include_draft_logprobs": True, "return_token_ids": True},
        )
        return done.model_dump()["choices"][0]

    found = []
    for each in ("none", method):
        speculation = json.dumps({"method": each, "adaptive": False})
        settings = {"DTYPE": "float32", "NUM_THREADS": "1", "SPECULATIVE_CONFIG": speculation}
        (tmp_path / each).mkdir()
        async with running_fleet(tmp_path / each, settings, fork) as fleet:
            await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
            url = f"{fleet.of('gateway')[0].url}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none") as client:
                asked = (ask(client, seed, ids) for seed, ids in enumerate(prompts))
                found.append(await asyncio.gather(*asked))
    without, choices = found
    num_right = 0
    for one, other in zip(without, choices, strict=True):
        assert other["token_ids"] == one["token_ids"]
        assert len(other["logprobs"]["tokens"]) == len(one["token_ids"])
        drafts = other["draft_logprobs"]["content"]
        num_right += sum(each["accepted"] for each in drafts)
        for each in drafts:
            assert not each["accepted"] or each["position"] < len(one["token_ids"])
    assert num_right > 0
    assert all(choice["draft_logprobs"]["content"] == [] for choice in without)
