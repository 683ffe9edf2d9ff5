"""The parser's refusals, and the client's error."""

from collections.abc import Callable
from typing import Any

import pytest

from services.gateway.chat.requests.parse import Limits, parse_chat, parse_completion
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest
from tests.services.gateway.asking import chat, completion
from tests.services.gateway.fakes import LIMITS, MODEL


def refusal_of(parse: Callable[..., Job], **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse(MODEL, **fields)
    return error.value


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"model":"\xff"}', b"[" * 100_000, b"[]", b"3"]
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body"):
        parse_chat(body, MODEL, LIMITS)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 2.5}, "temperature", ["2.5", "<= 2"]),
        ({"temperature": "hot"}, "temperature", ['"hot"', "float"]),
        ({"top_p": 0}, "top_p", ["0", "> 0"]),
        ({"top_k": -2}, "top_k", ["-2", ">= -1"]),
        ({"seed": 2**63}, "seed", [str(2**63), str(2**63 - 1)]),
        ({"max_tokens": 0}, "max_tokens", ["max_tokens is 0", ">= 1"]),
        ({"max_completion_tokens": 0}, "max_completion_tokens", ["is 0", ">= 1"]),
        ({"max_tokens": 1.5}, "max_tokens", ["1.5", "int"]),
        ({"max_completion_tokens": True}, "max_completion_tokens", ["true", "int"]),
        ({"stop": ""}, "stop", ['""', ">= 1"]),
        ({"stop": ["a", ""]}, "stop[1]", ['""', ">= 1"]),
        ({"stop": ["a"] * 17}, "stop", ["17", "<= 16"]),
        ({"stop": "x" * 1001}, "stop", ["xxx…", "<= 1000"]),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", ["not a field"]),
        ({"min_p": 1.1}, "min_p", ["1.1", "<= 1"]),
        ({"top_n_sigma": -0.5}, "top_n_sigma", ["-0.5", ">= 0"]),
        ({"top_n_sigma": 101}, "top_n_sigma", ["101", "<= 100"]),
        ({"top_n_sigma": "1"}, "top_n_sigma", ['"1"', "float"]),
        ({"presence_penalty": -2.1}, "presence_penalty", ["-2.1", ">= -2"]),
        ({"frequency_penalty": 2.1}, "frequency_penalty", ["2.1", "<= 2"]),
        ({"repetition_penalty": 0.009}, "repetition_penalty", ["0.009", ">= 0.01"]),
        ({"repetition_penalty": 11}, "repetition_penalty", ["11", "<= 10"]),
        ({"logit_bias": {"x": 1}}, "logit_bias", ['"x"', "below 100"]),
        ({"logit_bias": {"01": 1}}, "logit_bias", ['"01"', "below 100"]),
        ({"logit_bias": {"100": 1}}, "logit_bias", ['"100"', "below 100"]),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", ["101", "-100 to 100"]),
        ({"logit_bias": {"5": True}}, "logit_bias.5", ["true", "-100 to 100"]),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", ["<= 1024"]),
        ({"min_tokens": -1}, "min_tokens", ["-1", ">= 0"]),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", ["9", "max_tokens is 8"]),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", ["129", "<= 128"]),
        ({"stop_token_ids": [1, 100]}, "stop_token_ids[1]", ["100", "below 100"]),
        ({"bad_words": ["a"] * 129}, "bad_words", ["129", "<= 128"]),
        ({"bad_words": ["a", "x" * 101]}, "bad_words[1]", ["xxx…", "<= 100"]),
        ({"bad_words": [""]}, "bad_words[0]", ['""', ">= 1"]),
        ({"allowed_token_ids": []}, "allowed_token_ids", ["[]", ">= 1"]),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids", ["1025", "<= 1024"]),
        ({"allowed_token_ids": [100]}, "allowed_token_ids[0]", ["100", "below 100"]),
        ({"n": 0}, "n", ["0", ">= 1"]),
        ({"n": True}, "n", ["true", "int"]),
        ({"n": 9}, "n", ["9 choices", "max-choices = 8"]),
        ({"priority": 1001}, "priority", ["1001", "<= 1000"]),
        ({"cache_ttl": 86_401}, "cache_ttl", ["86401", "<= 86400"]),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention", ["1h", "24h"]),
        ({"priority": -1001}, "priority", ["-1001", ">= -1000"]),
        ({"priority": -1}, "priority", ["-1", "the lowest is 0", "max-priority-boost = 0"]),
        ({"cache_salt": ""}, "cache_salt", [">= 1"]),
        ({"cache_salt": "x" * 129}, "cache_salt", ["xxx…", "<= 128"]),
        ({"request_id": "a b"}, "request_id", ["a b", "regex"]),
        ({"request_id": "a~b"}, "request_id", ["a~b", "regex"]),
        ({"request_id": "a\n"}, "request_id", ["a\\n", "regex"]),
        ({"request_id": "x" * 129}, "request_id", ["xxx…", "regex"]),
        ({"logprobs": 5}, "logprobs", ["5", "bool"]),
        ({"top_logprobs": 3}, "top_logprobs", ["3", "logprobs is true"]),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "0 to 20"]),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", ["-1", "0 to 20"]),
        ({"include_draft_logprobs": True}, "include_draft_logprobs", ["true", "with logprobs"]),
        ({"include_draft_logprobs": 1}, "include_draft_logprobs", ["1", "bool"]),
        ({"messages": None}, "messages", ["null", "array"]),
        ({"messages": []}, "messages", ["[]", ">= 1"]),
        ({"messages": [3]}, "messages[0]", ["3", "object"]),
        ({"messages": [{"content": "a"}]}, "messages[0].role", ["required"]),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", ["3", "str"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type", ["image_url", "text"]),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text", ["required"]),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_field_value_and_limit(
    fields: dict[str, Any], param: str, words: list[str]
) -> None:
    error = refusal_of(chat, **fields)
    assert error.param == param
    assert all(word in error.message for word in [param, *words])
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([-1], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([1, MODEL.vocab_size], "prompt[1]"),
        ([1, 2**40], "prompt[1]"),
        ([True], "prompt[0]"),
        ({}, "prompt"),
        (["a", ""], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([1, [1]], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([[1], [2, -1]], "prompt[1][1]"),
        ([[1], [2, MODEL.vocab_size]], "prompt[1][1]"),
        (["a"] * 9, "prompt"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: object, param: str) -> None:
    assert refusal_of(completion, prompt=prompt).param == param


def test_a_missing_prompt_is_required() -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt is required$"):
        parse_completion(b"{}", MODEL, LIMITS)


def test_choices_are_counted_over_all_prompts() -> None:
    error = refusal_of(completion, prompt=["a", "b", "c"], n=3)
    assert error.param == "n"
    assert all(words in error.message for words in ("n is 3", "3 prompts", "max-choices = 8"))


def test_more_prompts_than_choices_are_refused_before_they_are_looked_at() -> None:
    error = refusal_of(completion, prompt=[*[[1]] * 8, [MODEL.vocab_size]])
    assert error.param == "prompt"
    assert "more than 8 items; the limit is max-choices = 8" in error.message


def test_a_completion_has_no_fewer_tokens_than_none() -> None:
    assert refusal_of(completion, max_tokens=-1).param == "max_tokens"


@pytest.mark.parametrize("asked", [0, 3])
def test_the_logprobs_of_a_prompt_are_not_streamed(asked: int) -> None:
    for error in (
        refusal_of(completion, stream=True, prompt_logprobs=asked),
        refusal_of(chat, stream=True, prompt_logprobs=asked),
    ):
        assert error.param == "prompt_logprobs"
        assert f"prompt_logprobs is {asked}; it is allowed without stream only" in error.message


@pytest.mark.parametrize("asked", [21, -1])
@pytest.mark.parametrize(
    ("parse", "name"), [(chat, "prompt_logprobs"), (completion, "logprobs")], ids=["prompt", "text"]
)
def test_more_logprobs_than_the_setting_allows_are_refused(
    parse: Callable[..., Job], name: str, asked: int
) -> None:
    error = refusal_of(parse, **{name: asked})
    assert error.param == name
    assert "0 to 20" in error.message


def test_more_logprobs_than_tokens_are_refused_where_the_setting_allows_all() -> None:
    with pytest.raises(InvalidRequest, match=f"0 to {MODEL.vocab_size}"):
        completion(MODEL, Limits(max_choices=1, max_logprobs=-1), logprobs=MODEL.vocab_size + 1)
