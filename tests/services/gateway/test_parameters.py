"""Each parameter reaches the tokenizer unchanged; missing ones have defaults."""

from typing import Any

import msgspec
import pytest

from services.gateway.chat.requests.parse import Limits
from shared.errors import InvalidRequest
from shared.wire.messages import (
    ALL_TOKENS,
    Repetition,
    SamplingDefaults,
    SamplingParams,
    TextOptions,
)
from tests.services.gateway.asking import CALLER, chat, completion
from tests.services.gateway.fakes import MODEL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -5),
        ("temperature", 0.25),
        ("top_k", 7),
        ("top_p", 0.5),
        ("max_tokens", 9),
        ("ignore_eos", True),
        ("min_p", 0.125),
        ("top_n_sigma", 1.5),
        ("presence_penalty", -1.5),
        ("frequency_penalty", 1.5),
        ("repetition_penalty", 1.25),
        ("min_tokens", 3),
        ("stop_token_ids", [3, 99]),
        ("allowed_token_ids", [0, 99]),
    ],
)
def test_sampling_is_as_the_client_asks(name: str, value: object) -> None:
    for job in (completion(**{name: value}), chat(**{name: value})):
        expected = msgspec.structs.replace(SamplingParams(job.params.seed), **{name: value})
        assert job.params == expected


def test_names_of_fastdeploy_mean_the_same() -> None:
    for parse in (completion, chat):
        assert parse(bad_words_token_ids=[3, 9]).params.bad_words == [[3], [9]]
        assert parse(max_streaming_response_tokens=7).stream_interval == 7
        assert parse(model="default").model == MODEL.names[0]


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("stop", "a", {"stop": ["a"]}),
        ("stop", ["a", "b"], {"stop": ["a", "b"]}),
        ("bad_words", ["a b"], {"bad_words": ["a b"]}),
        ("include_stop_str_in_output", True, {"includes_stop": True}),
        ("skip_special_tokens", False, {"skips_special_tokens": False}),
        ("add_special_tokens", False, {"adds_special_tokens": False}),
    ],
)
def test_text_options_are_as_the_client_asks(
    name: str, value: object, options: dict[str, Any]
) -> None:
    assert completion(**{name: value}).text == TextOptions(**options)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 7}, TextOptions(max_prompt_tokens=7)),
        ({"truncate_prompt_tokens": -1}, TextOptions(max_prompt_tokens=MODEL.max_model_len - 1)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4},
         TextOptions(max_prompt_tokens=MODEL.max_model_len - 4)),
        ({"truncate_prompt_tokens": 7, "truncation_side": "right"},
         TextOptions(max_prompt_tokens=7, keeps_prompt_start=True)),
    ],
)  # fmt: skip
def test_a_prompt_is_cut_to_as_many_tokens_as_the_client_says_or_as_fit(
    fields: dict[str, Any], expected: TextOptions
) -> None:
    assert completion(**fields).text == expected
    unmarked = msgspec.structs.replace(expected, adds_special_tokens=False)
    assert chat(**fields).text == unmarked


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"truncate_prompt_tokens": 0}, r"is 0; expected -1, or 1 to 63: .* 64 tokens"),
        ({"truncate_prompt_tokens": 64}, r"is 64; expected -1, or 1 to 63: .* max_tokens is 1"),
        ({"truncate_prompt_tokens": 61, "max_tokens": 4}, "is 61; expected -1, or 1 to 60"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 64}, "is -1; expected null"),
        ({"truncate_prompt_tokens": -2}, "is -2; expected int >= -1"),
    ],
)
def test_a_prompt_is_not_truncated_to_a_length_without_room(
    fields: dict[str, Any], message: str
) -> None:
    for parse in (completion, chat):
        with pytest.raises(InvalidRequest, match=message) as error:
            parse(**fields)
        assert error.value.param == "truncate_prompt_tokens"


def test_ids_that_will_be_cut_may_be_more_than_the_context_holds() -> None:
    ids = list(range(MODEL.max_model_len + 1))
    for prompt in (ids, [ids]):
        job = completion(prompt=prompt, truncate_prompt_tokens=-1)
        assert job.prompts[0].data.tolist() == ids
        with pytest.raises(InvalidRequest, match="max-model-len = 64"):
            completion(prompt=prompt)


def test_a_chat_template_writes_the_special_tokens_unless_the_request_sets_otherwise() -> None:
    assert not chat().text.adds_special_tokens
    assert chat(add_special_tokens=True).text.adds_special_tokens
    assert completion().text.adds_special_tokens


def test_logit_biases_are_pairs_of_id_and_number() -> None:
    job = completion(logit_bias={"5": -100, "0": 2.5})
    assert job.params.logit_bias == [(5, -100.0), (0, 2.5)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_a_chat_asks_for_logprobs_with_two_fields(
    fields: dict[str, Any], expected: int | None
) -> None:
    assert chat(**fields).params.logprobs == expected


def test_draft_logprobs_are_sent_where_the_client_asks_for_them_and_for_logprobs() -> None:
    asked: dict[str, Any] = {"include_draft_logprobs": True}
    assert completion(logprobs=0, **asked).params.draft_logprobs
    assert chat(logprobs=True, **asked).params.draft_logprobs
    for other in (False, None):
        assert not completion(include_draft_logprobs=other).params.draft_logprobs


def test_a_completion_asks_for_logprobs_with_one_field() -> None:
    assert [completion(logprobs=asked).params.logprobs for asked in (None, 0, 5)] == [None, 0, 5]
    limits = Limits(max_choices=1, max_logprobs=-1)
    for asked in (ALL_TOKENS, MODEL.vocab_size):  # the setting allows all
        assert completion(CALLER, limits, logprobs=asked).params.logprobs == asked


def test_the_rest_of_a_request_is_kept_beside_its_sampling() -> None:
    job = completion(
        priority=3, n=2, echo=True, return_token_ids=True, return_tokens_as_token_ids=True,
        request_id="r-1", cache_salt="mine",
    )  # fmt: skip
    assert (job.options.priority, job.num_choices, job.request_id) == (3, 2, "r-1")
    assert (job.options.salt, completion().options.salt) == ("mine", "")
    assert (job.echoes, job.returns_ids, job.names_by_id) == (True, True, True)


@pytest.mark.parametrize(
    ("fields", "retention_s"),
    [
        ({}, 0),
        ({"cache_ttl": 60}, 60),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_retention": "24h", "cache_ttl": 0}, 0),
    ],
)
def test_a_client_may_ask_for_a_time_in_the_cache(fields: Any, retention_s: int) -> None:
    assert chat(**fields).options.retention_s == retention_s
    assert completion(**fields).options.retention_s == retention_s


def test_a_priority_may_be_lowered_and_raised_as_far_as_the_setting_allows() -> None:
    limits = Limits(max_choices=1, max_logprobs=0, max_priority_boost=5)
    for priority in (1000, 0, -5):
        assert completion(CALLER, limits, priority=priority).options.priority == priority
    with pytest.raises(InvalidRequest, match=r"-6; the lowest is -5.*max-priority-boost = 5"):
        completion(CALLER, limits, priority=-6)


def test_several_choices_may_be_greedy() -> None:
    assert completion(n=3, temperature=0).num_choices == 3


DEFAULTS = SamplingDefaults(
    temperature=0.5, top_k=20, top_p=0.75, min_p=0.25, repetition_penalty=1.5, top_n_sigma=2.5
)
TUNED = msgspec.structs.replace(MODEL, defaults=DEFAULTS)


@pytest.mark.parametrize("name", DEFAULTS.__struct_fields__)
def test_a_parameter_that_a_request_does_not_set_is_the_models_default(name: str) -> None:
    default = getattr(DEFAULTS, name)
    assert getattr(completion(TUNED).params, name) == default
    for value, expected in ((None, default), (1, 1)):
        assert getattr(completion(TUNED, **{name: value}).params, name) == expected


@pytest.mark.parametrize("off", [0, -1])
def test_a_client_can_turn_off_the_models_top_k(off: int) -> None:
    assert completion(TUNED, top_k=off).params.top_k == 0


def test_the_client_knows_a_field_by_its_own_name() -> None:
    assert completion(max_tokens=5).field_names == {}
    assert chat(max_tokens=5).field_names == {"prompt": "messages"}
    assert chat(max_completion_tokens=5).field_names["max_tokens"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("prompt", "kind", "sent"),
    [
        ("ab", "text", [b"ab"]),
        (["ab", "c"], "text", [b"ab", b"c"]),
        ([1, 2], "ids", [[1, 2]]),
        ([[1, 2], [3]], "ids", [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_several_of_either(
    prompt: object, kind: str, sent: list[Any]
) -> None:
    prompts = completion(prompt=prompt).prompts
    assert {each.kind for each in prompts} == {kind}
    datas = [each.data.tobytes() if kind == "text" else each.data.tolist() for each in prompts]
    assert datas == sent


def test_repetition_settings_of_the_client_are_passed_on() -> None:
    def asked(**sizes: int) -> Repetition | None:
        return chat(repetition_detection=sizes).params.repetition

    assert asked(max_pattern_size=9, min_count=3) == Repetition(9, 1, 3)
    assert asked(max_pattern_size=9, min_pattern_size=4, min_count=2) == Repetition(9, 4, 2)
    assert asked(max_pattern_size=0, min_count=3) is None
    assert asked() is None
    for sizes, param in (
        ({"max_pattern_size": 9}, "repetition_detection.min_count"),
        ({"max_pattern_size": 9, "min_count": 1}, "repetition_detection.min_count"),
        ({"max_pattern_size": 513, "min_count": 2}, "repetition_detection.max_pattern_size"),
        (
            {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
            "repetition_detection.min_pattern_size",
        ),
        ({"max_pattern_size": 2, "min_counts": 2}, "repetition_detection.min_counts"),
    ):
        with pytest.raises(InvalidRequest) as error:
            asked(**sizes)
        assert error.value.param == param


def test_logprobs_are_of_the_ids_that_the_client_names() -> None:
    fields: dict[str, Any] = {"logprob_token_ids": [7, 3, 7], "logprobs": True, "top_logprobs": 5}
    assert chat(**fields).params.logprob_token_ids == [7, 3]
    assert chat(**fields).params.logprobs == 2
    assert chat(**fields | {"logprob_token_ids": []}).params.logprobs == 5
    job = completion(logprobs=4, logprob_token_ids=[3], echo=True, prompt_logprobs=1)
    assert (job.params.logprobs, job.params.prompt_logprobs, job.num_echoed_logprobs) == (1, 4, 4)
    for change, words in (
        ({"logprobs": False, "top_logprobs": 0}, "with logprobs only"),
        ({"logprob_token_ids": [*range(129)]}, "128"),
        ({"logprob_token_ids": [MODEL.vocab_size]}, str(MODEL.vocab_size)),
    ):
        with pytest.raises(InvalidRequest, match=words) as error:
            chat(**fields | change)
        assert (error.value.param or "").startswith("logprob_token_ids")
