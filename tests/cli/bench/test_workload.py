"""Settings are made from flags, as users give them."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.options import parse
from cli.bench.trace import TraceLine
from cli.bench.workload import FIRST_ID, Request, random_prompts, random_requests, traced_requests


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def bodies(requests: list[Request]) -> list[dict]:
    return [json.loads(request.body) for request in requests]


@given(
    st.integers(0, 20),
    st.integers(1, 5),
    st.integers(FIRST_ID + 1, 10**6),
    st.integers(1, 30),
    st.integers(0, 2**32 - 1),
)
def test_prompts_share_prefixes_and_are_as_long_as_asked(prefix_len, num, vocab, num_in, seed):
    flags = f"--prefix-len {prefix_len} --vocab-size {vocab} --input-len uniform:{num_in},40"
    many = ["--num-prefixes", str(num)] if prefix_len else []
    settings = parse([*flags.split(), *many])
    prompts = random_prompts(settings, 30, rng(seed))
    assert len(prompts) == 30
    assert all(prefix_len + num_in <= len(prompt) <= prefix_len + 40 for prompt in prompts)
    assert all(FIRST_ID <= each < vocab for prompt in prompts for each in prompt)
    assert len({tuple(prompt[:prefix_len]) for prompt in prompts}) <= (num if prefix_len else 1)
    assert prompts == random_prompts(settings, 30, rng(seed))


def test_all_prefixes_are_used_with_different_continuations():
    settings = parse(["--prefix-len", "6", "--num-prefixes", "4", "--input-len", "12"])
    prompts = random_prompts(settings, 100, rng())
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 4
    assert len({tuple(prompt[6:]) for prompt in prompts}) == 100


def test_a_completion_has_ids_as_prompt_and_the_length_of_its_answer():
    settings = parse(["--input-len", "4", "--output-len", "uniform:2,9", "--logprobs", "3"])
    requests = random_requests(settings, "m", 20, rng())
    for request, body in zip(requests, bodies(requests), strict=True):
        assert len(body.pop("prompt")) == 4
        assert 2 <= request.max_tokens <= 9
        assert body == {
            "model": "m",
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "logprobs": 3,
        }
    assert len({request.max_tokens for request in requests}) > 1


def test_a_chat_has_words_as_prompt_with_the_same_common_prefix():
    flags = "--endpoint chat --input-len 4 --prefix-len 3 --logprobs 2 --no-ignore-eos"
    extra = ["--extra-body", '{"top_p": 0.5, "temperature": 0.9}']
    found = bodies(random_requests(parse([*flags.split(), *extra]), "m", 5, rng()))
    texts = [body["messages"][0]["content"].split(" ") for body in found]
    assert {len(words) for words in texts} == {7}
    assert len({tuple(words[:3]) for words in texts}) == 1
    assert found[0]["logprobs"] is True
    assert found[0]["top_logprobs"] == 2
    assert found[0]["top_p"] == 0.5
    assert found[0]["temperature"] == 0.9
    assert "ignore_eos" not in found[0]


def test_a_line_of_a_trace_without_a_length_gets_the_settings():
    lines = [TraceLine(prompt="a", max_tokens=3), TraceLine(prompt=[1, 2])]
    requests = traced_requests(parse(["--output-len", "8"]), "m", lines, rng())
    assert [request.max_tokens for request in requests] == [3, 8]
    assert [body["prompt"] for body in bodies(requests)] == ["a", [1, 2]]
    assert [body["max_tokens"] for body in bodies(requests)] == [3, 8]
