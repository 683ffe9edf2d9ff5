"""Prompt logprobs in replies: vLLM's lists, and OpenAI's echo."""

import asyncio
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from openai import AsyncOpenAI

from services.gateway.chat.replies.logprob_json import LogprobsById
from services.gateway.chat.requests.parse import Limits, parse_chat, parse_completion
from services.gateway.chat.requests.reply_bytes import prompt_bytes
from services.gateway.mesh.job import Job
from services.gateway.mesh.token_table import TokenTable
from shared.wire.messages import ALL_TOKENS, WINDOW_BYTES, RunKind
from tests.services.gateway.client import CHAT, HI, TEXT, Answer, Client, with_settings
from tests.services.gateway.fakes import LIMITS, MODEL, FakeTokenizer, Submitted, fake_tokenizer
from tests.services.gateway.test_logprob_json import update

PROMPT = [6, 7, 8]  # " w6 w7 w8"
OF_PROMPT = [
    None,
    {"7": {"logprob": -0.5, "rank": 2, "decoded_token": " w7"},
     "9": {"logprob": -0.25, "rank": 1, "decoded_token": " w9"}},
    {"8": {"logprob": -4, "rank": 5, "decoded_token": " w8"},
     "7": {"logprob": -0.125, "rank": 1, "decoded_token": " w7"},
     "1": {"logprob": -0.5, "rank": 2, "decoded_token": "�"}},
]  # fmt: skip


def add_prompt_logprobs(request: Submitted) -> None:
    """Sends logprobs of the prompt's second and third token, in two messages, with two alternatives
    each."""
    request.logprobs("", [7], [[-0.5, -0.25, -0.5]], [[9, 7]], [2], of_prompt=True)
    request.logprobs("", [8], [[-4, -0.125, -0.5]], [[7, 1]], [5], of_prompt=True)


async def serve(tokenizer: FakeTokenizer, num_choices: int = 1, writes: bool = True) -> Submitted:
    """Sends the prompt's logprobs, and one token with two alternatives for each choice."""
    request = await tokenizer.submitted.get()
    request.accept(PROMPT)
    add_prompt_logprobs(request)
    for choice in range(num_choices):
        if writes:
            request.logprobs("a", [10], [[-1, -0.5, -1]], [[9, 10]], [2], choice)
        request.finish("length", choice)
    return request


async def scored(
    client: Client, path: str = TEXT, writes: bool = True, **body: Any
) -> tuple[Answer, Submitted]:
    body = ({"prompt": PROMPT} if path == TEXT else {"messages": HI}) | body
    script = serve(client.tokenizer, body.get("n", 1), writes)
    answer, request = await asyncio.gather(client.post(path, **body), script)
    assert answer.status == 200, answer.text
    return answer, request


async def test_each_choice_of_a_completion_has_the_prompts_logprobs(client: Client) -> None:
    answer, request = await scored(client, prompt_logprobs=2, n=2)
    assert request.submit.params.prompt_logprobs == 2
    assert request.submit.params.logprobs is None
    assert [choice["prompt_logprobs"] for choice in answer.choices] == [OF_PROMPT] * 2
    assert [choice["logprobs"] for choice in answer.choices] == [None, None]
    assert answer.json["usage"]["completion_tokens"] == 2
    assert list(answer.choices[0]["prompt_logprobs"][2]) == ["8", "7", "1"]


async def test_a_chat_has_them_on_top(client: Client) -> None:
    answer, _ = await scored(client, CHAT, prompt_logprobs=2, logprobs=True, top_logprobs=2)
    assert answer.json["prompt_logprobs"] == OF_PROMPT
    [choice] = answer.choices
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [" w10"]
    assert "prompt_logprobs" not in choice


async def test_prompt_logprobs_come_only_on_request(client: Client) -> None:
    answer, request = await client.answered(TEXT, "x", prompt="a")
    assert request.submit.params.prompt_logprobs is None
    assert "prompt_logprobs" not in answer.text


async def test_an_echo_begins_the_columns_with_the_prompt(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    reply, request = await asyncio.gather(
        openai.completions.create(model="fish", prompt=PROMPT, echo=True, logprobs=2, n=2),
        serve(tokenizer, 2),
    )
    assert request.submit.params.prompt_logprobs == 2
    for choice in reply.choices:
        assert choice.text == " w6 w7 w8a"
        logprobs = choice.logprobs
        assert logprobs.tokens == [" w6", " w7", " w8", " w10"]
        assert logprobs.text_offset == [0, 3, 6, 9]
        assert logprobs.token_logprobs == [None, -0.5, -4, -1]
        assert logprobs.top_logprobs == [
            None,
            {" w9": -0.25, " w7": -0.5},
            {" w7": -0.125, "bytes:\\xe2\\x82": -0.5, " w8": -4},
            {" w9": -0.5, " w10": -1},
        ]


async def test_an_echo_and_the_list_have_as_many_alternatives_as_each_was_asked_for(
    client: Client,
) -> None:
    answer, request = await scored(client, echo=True, logprobs=1, prompt_logprobs=2)
    assert (request.submit.params.logprobs, request.submit.params.prompt_logprobs) == (1, 2)
    [choice] = answer.choices
    assert choice["prompt_logprobs"] == OF_PROMPT
    assert choice["logprobs"]["top_logprobs"][:3] == [
        None,
        {" w9": -0.25, " w7": -0.5},
        {" w7": -0.125, " w8": -4},
    ]


async def test_objects_by_ids_of_an_echo_begin_with_the_prompt(client: Client) -> None:
    answer, _ = await scored(client, echo=True, logprobs=2, logprobs_by_token_id=True)
    [choice] = answer.choices
    assert choice["logprobs"][:3] == OF_PROMPT
    assert list(choice["logprobs"][3]) == ["10", "9"]


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_streamed_echo_goes_on_from_the_prompt_in_each_choice(
    client: Client, num_choices: int
) -> None:
    async def early() -> None:
        """The second choice precedes the prompt logprobs."""
        request = await client.tokenizer.submitted.get()
        request.accept(PROMPT)
        if num_choices == 2:
            request.logprobs("b", [11], [[-1]], choice=1)
            request.finish("length", 1)
        await asyncio.sleep(0.05)
        add_prompt_logprobs(request)
        await asyncio.sleep(0.05)
        request.logprobs("a", [10], [[-1]])
        request.finish("length")

    body = {"prompt": PROMPT, "echo": True, "logprobs": 0, "n": num_choices, "stream": True}
    texts = [""] * num_choices
    columns: list[Any] = [([], [], []) for _ in range(num_choices)]
    for chunk in (await client.served(early(), TEXT, **body)).events:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if logprobs := choice["logprobs"]:
            for column, name in enumerate(("tokens", "token_logprobs", "text_offset")):
                columns[choice["index"]][column].extend(logprobs[name])
    assert texts == [" w6 w7 w8a", " w6 w7 w8b"][:num_choices]
    for index, (tokens, values, offsets) in enumerate(columns):
        assert tokens == [" w6", " w7", " w8", f" w{10 + index}"]
        assert values == [None, -0.5, -4, -1]
        assert offsets == [0, 3, 6, 9]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_scoring_has_the_prompt_and_no_token(client: Client, is_stream: bool) -> None:
    answer, request = await scored(
        client, writes=False, max_tokens=0, echo=True, logprobs=2, stream=is_stream
    )
    assert request.submit.params.max_tokens == 0
    choices = [each["choices"][0] for each in (answer.events if is_stream else [answer.json])]
    assert is_stream or answer.json["usage"]["completion_tokens"] == 0
    assert "".join(choice["text"] for choice in choices) == " w6 w7 w8"
    assert choices[-1]["finish_reason"] == "length"
    values = [choice["logprobs"]["token_logprobs"] for choice in choices if choice["logprobs"]]
    assert list(chain.from_iterable(values)) == [None, -0.5, -4]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_of_one_token_has_no_logprobs(client: Client, is_stream: bool) -> None:
    async def script() -> None:
        request = await client.tokenizer.submitted.get()
        request.accept([6])
        request.logprobs("a", [10], [[-1]])
        request.finish("length")

    body = {"prompt": [6], "echo": True, "logprobs": 0, "stream": is_stream}
    answer = await client.served(script(), TEXT, **body)
    [choice] = (answer.events[0] if is_stream else answer.json)["choices"]
    assert choice["logprobs"]["tokens"] == [" w6", " w10"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1]
    assert choice["logprobs"]["top_logprobs"] == [None, {" w10": -1}]


async def test_each_prompt_of_a_list_has_its_own(client: Client) -> None:
    async def script() -> None:
        first, second = [await client.tokenizer.submitted.get() for _ in range(2)]
        for request, ids in ((second, [6, 7]), (first, [6, 8])):
            request.accept(ids)
        for request, ids in ((second, [6, 7]), (first, [6, 8])):
            request.logprobs("", ids[1:], [[-ids[1]]], of_prompt=True)
            request.finish("length")

    body: Any = {"prompt": [[6, 8], [6, 7]], "prompt_logprobs": 0, "max_tokens": 0}
    choices = (await client.served(script(), TEXT, **body)).choices
    entries = [choice["prompt_logprobs"][1] for choice in choices]
    assert [list(each) for each in entries] == [["8"], ["7"]]
    assert entries[0]["8"]["logprob"] == -8


async def test_a_choice_that_is_aborted_in_its_prompt_has_the_logprobs_that_came(
    client: Client,
) -> None:
    async def script() -> None:
        request = await client.tokenizer.submitted.get()
        request.accept(PROMPT)
        request.logprobs("b", [11], [[-1]], choice=1)
        request.finish("length", 1)
        request.logprobs("", [7], [[-0.5]], of_prompt=True)
        request.finish("abort")

    body: Any = {"prompt": PROMPT, "echo": True, "logprobs": 0, "n": 2}
    choices = (await client.served(script(), TEXT, **body)).choices
    assert [choice["finish_reason"] for choice in choices] == ["abort", "length"]
    tokens = [choice["logprobs"]["tokens"] for choice in choices]
    assert tokens == [[" w6", " w7"], [" w6", " w7", " w11"]]


async def test_a_replay_asks_for_the_prompt_tokens_that_are_not_scored_yet(
    tmp_path: Path, client: Client
) -> None:
    async def script() -> None:
        request = await client.tokenizer.submitted.get()
        request.accept(PROMPT)
        request.logprobs("", [7], [[-0.5]], of_prompt=True)
        await asyncio.sleep(0.1)
        async with fake_tokenizer(tmp_path, "t2") as other:
            await client.tokenizer.link.close("the test wants so")
            again = await other.submitted.get()
            [start] = again.submit.choices
            assert (start.num_prompt_scored, start.num_ids) == (1, 0)
            assert again.prompt.tolist() == PROMPT
            again.accept(PROMPT)
            again.num_prompt_scored[0] = 1
            again.logprobs("", [8], [[-4]], of_prompt=True)
            again.finish("length")

    body: Any = {"prompt": PROMPT, "prompt_logprobs": 0, "max_tokens": 0}
    [choice] = (await client.served(script(), TEXT, **body)).choices
    entries = choice["prompt_logprobs"]
    assert [entry and list(entry) for entry in entries] == [None, ["7"], ["8"]]


async def test_prompt_logprobs_are_in_no_count_of_tokens(client: Client) -> None:
    async def count() -> float:
        lines = (await client.get("/metrics")).text.splitlines()
        named = [line for line in lines if line.startswith("vllm:generation_tokens_total")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in named)

    before = await count()
    await scored(client, prompt_logprobs=2)
    assert await count() == before + 1


def completion(**fields: Any) -> Job:
    limits = Limits(max_choices=8, max_logprobs=ALL_TOKENS)
    return parse_completion(json.dumps({"prompt": "a"} | fields).encode(), MODEL, limits)


def test_the_mesh_is_asked_for_the_larger_number() -> None:
    def asked(**fields: Any) -> tuple[int | None, int | None]:
        job = completion(**fields)
        return job.params.prompt_logprobs, job.num_prompt_logprobs

    assert asked() == (None, None)
    assert asked(echo=True, prompt_logprobs=3) == (3, 3)
    assert asked(logprobs=5, prompt_logprobs=3) == (3, 3)
    assert asked(echo=True, logprobs=5, prompt_logprobs=3) == (5, 3)
    assert asked(echo=True, logprobs=5) == (5, None)
    assert asked(echo=True, logprobs=-1, prompt_logprobs=3) == (ALL_TOKENS, 3)
    assert asked(echo=True, logprobs=0, prompt_logprobs=-1) == (ALL_TOKENS, ALL_TOKENS)
    chat = json.dumps({"messages": HI, "prompt_logprobs": 20}).encode()
    assert parse_chat(chat, MODEL, LIMITS).params.prompt_logprobs == 20


def test_bytes_are_counted_for_each_token_of_the_prompts_streamed_ones_up_to_a_window() -> None:
    ids = [np.zeros(4, np.int32), np.zeros(6, np.int32)]
    per_token = 8 * (2 + 3)
    assert prompt_bytes(completion(prompt_logprobs=3), MODEL, ids) == 10 * per_token
    assert prompt_bytes(completion(prompt_logprobs=3, n=2), MODEL, ids) == 10 * per_token
    whole = prompt_bytes(completion(prompt_logprobs=-1), MODEL, ids)
    assert whole == 10 * 8 * (2 + MODEL.vocab_size)
    streamed = completion(echo=True, logprobs=3, stream=True)
    assert prompt_bytes(streamed, MODEL, ids) == 10 * per_token
    long = [np.zeros(WINDOW_BYTES // per_token + 50, np.int32), *ids]
    assert prompt_bytes(streamed, MODEL, long) == WINDOW_BYTES + 11 * per_token
    assert prompt_bytes(completion(logprobs=3), MODEL, ids) == 0


@with_settings(max_logprobs=-1, max_buffered_bytes=40_000)
async def test_more_than_the_gateway_may_hold_is_refused(client: Client) -> None:
    asked, request = await client.begun(TEXT, prompt="a", prompt_logprobs=-1)
    request.accept([6] * 60)
    answer = await asked
    assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")
    assert "max-buffered-bytes = 40000" in answer.error["message"]
    await asyncio.wait_for(client.tokenizer.cancelled.get(), 10)


def test_the_whole_vocabulary_is_numbered_by_its_ranks() -> None:
    size = 3000
    words = [f"w{token}".encode() for token in range(size)]
    lengths = np.array(list(map(len, words)), np.int32)
    table = TokenTable(np.frombuffer(b"".join(words), np.uint8), lengths)
    values = -np.random.default_rng(1).exponential(9, size).astype(np.float32)
    token, rank = 17, 1 + int((values > values[17]).sum())
    written = {}
    for num_top in (ALL_TOKENS, 5):
        row = np.concatenate((values[token : token + 1], values))
        got = update([token], [row], ranks=[rank])
        got = replace(got, run=msgspec.structs.replace(got.run, kind=RunKind.PROMPT))
        written[num_top] = json.loads(b"".join(LogprobsById(table, num_top).write([got])))
    [nothing, entries] = written[ALL_TOKENS]
    assert nothing is None
    order = np.argsort(-values, kind="stable").tolist()
    assert {int(key): each["rank"] for key, each in entries.items()} == {
        token_id: number for number, token_id in enumerate(order, 1)
    }
    assert next(iter(entries)) == str(token)
    assert all(np.float32(each["logprob"]) == values[int(key)] for key, each in entries.items())
    assert list(written[5][1]) == [str(token), *map(str, order[:5])]
