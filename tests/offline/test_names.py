"""Names and forms that need no server: vLLM's, ours, and wrong ones."""

from enum import Enum
from typing import Any

import pytest

from shared.settings.known import NAMES
from shared.settings.serve import ServeConfig
from shoal import LLM, PoolingParams, SamplingParams, StructuredOutputsParams
from shoal.outputs import Choice
from shoal.prompts import Prompt, one_each, read_conversations, read_prompts
from shoal.refusals import ATTRIBUTES, refuse_arguments
from shoal.tokenizer import Tokenizer

# Arguments of LLM and EngineArgs in vLLM's documentation and examples; LLM takes revision itself.
VLLM_SETTINGS = """
    model runner convert task tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code
    allowed_local_media_path allowed_media_domains tensor_parallel_size dtype quantization
    tokenizer_revision chat_template seed gpu_memory_utilization kv_cache_memory_bytes swap_space
    cpu_offload_gb enforce_eager enable_return_routed_experts disable_custom_all_reduce hf_token
    hf_overrides mm_processor_kwargs pooler_config override_pooler_config structured_outputs_config
    profiler_config attention_config kernel_config compilation_config logits_processors
    max_model_len max_num_seqs max_num_batched_tokens max_logprobs block_size kv_cache_dtype
    enable_prefix_caching enable_chunked_prefill speculative_config distributed_executor_backend
    load_format enable_lora max_loras max_lora_rank disable_log_stats max_seq_len_to_capture
    num_scheduler_steps limit_mm_per_prompt served_model_name data_parallel_size
    pipeline_parallel_size guided_decoding_backend download_dir disable_async_output_proc
    async_scheduling generation_config override_generation_config
"""


class Kind(Enum):
    """As vLLM's RequestOutputKind."""

    FINAL_ONLY = 2


@pytest.mark.parametrize("name", VLLM_SETTINGS.split())
def test_each_setting_of_vllm_is_ours_or_known(name: str):
    assert name in ServeConfig.model_fields or NAMES.find(name)


def test_the_body_has_the_fields_of_the_http_api():
    params = SamplingParams(
        temperature=0.5, top_k=-1, stop="a", logit_bias={5: -1.0}, logprobs=0, detokenize=False
    )
    body = params.body()
    assert body["logit_bias"] == {"5": -1.0}
    assert body["logprobs_by_token_id"] is True
    assert (body["temperature"], body["top_k"], body["stop"]) == (0.5, -1, "a")
    assert (body["max_tokens"], body["top_p"]) == (16, 1.0)
    assert body.keys().isdisjoint({"seed", "detokenize", "structured_outputs"})
    assert "max_tokens" not in SamplingParams(max_tokens=None).body()
    assert "logprobs_by_token_id" not in SamplingParams().body()
    of_ids = SamplingParams(logprob_token_ids=[5]).body()
    assert (of_ids["logprobs"], of_ids["logprobs_by_token_id"]) == (0, True)
    assert SamplingParams(slo={"tpot_ms": 20}).body()["slo"] == {"tpot_ms": 20}
    assert "slo" not in body


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_the_form_of_a_text_has_both_names_of_vllm(name: str):
    form: Any = StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True)
    expected = {"json": {"type": "object"}, "disable_any_whitespace": True}
    assert SamplingParams(**{name: form}).body()["structured_outputs"] == expected


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"temprature": 1}, "temprature is not an argument; did you mean temperature?"),
        ({"fish": 1}, "SamplingParams: fish is not an argument"),
        ({"best_of": 3}, "best_of=3 is not supported: texts are not ranked"),
        ({"logits_processors": [print]}, "no foreign code is loaded"),
        ({"flat_logprobs": True}, "logprobs are lists of dicts"),
    ],
)
def test_a_wrong_name_is_a_type_error(names: dict[str, Any], text: str):
    with pytest.raises(TypeError) as error:
        SamplingParams(**names)
    assert text in str(error.value)


def test_neutral_values_of_vllm_are_accepted_and_misspelt_attributes_are_not():
    neutral: dict[str, Any] = {"best_of": 1, "flat_logprobs": False, "extra_args": None}
    neutral["output_kind"] = Kind.FINAL_ONLY
    params = SamplingParams(**neutral)
    assert params == SamplingParams()
    with pytest.raises(AttributeError):
        params.temprature = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="did you mean dimensions"):
        PoolingParams(dimension=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", [Prompt("a")]),
        ([], []),
        (["a", "b"], [Prompt("a"), Prompt("b")]),
        ([1, 2], [Prompt(None, [1, 2])]),
        ([[1, 2], "a"], [Prompt(None, [1, 2]), Prompt("a")]),
        ({"prompt": "a", "cache_salt": "s"}, [Prompt("a", None, "s")]),
        ({"prompt": "a", "prompt_token_ids": (1,)}, [Prompt("a", [1])]),
        ({"prompt": "a", "multi_modal_data": None}, [Prompt("a")]),
    ],
)
def test_prompts_have_each_form_of_vllm(given: Any, expected: list[Prompt]):
    assert read_prompts(given) == expected


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["a", 1.5], r"prompts\[1\]: expected a text, token ids or a dict, not float"),
        ([True, False], r"prompts\[0\]: expected"),
        ([[]], r"prompts\[0\]: expected"),
        ({"prompt": None}, "prompts: needs prompt"),
        ({"prompt_token_ids": "ab"}, "prompts: needs prompt, a text, or prompt_token_ids, a list"),
        ([{"prompt_token_ids": [[1], [2]]}], r"prompts\[0\]: needs prompt"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompts: multi_modal_data is not supported"),
    ],
)
def test_a_wrong_prompt_is_a_type_error(given: Any, text: str):
    with pytest.raises(TypeError, match=text):
        read_prompts(given)


def test_one_conversation_is_a_list_of_one():
    message = {"role": "user", "content": "a"}
    assert read_conversations([message]) == [[message]]
    assert read_conversations([[message], [message]]) == [[message]] * 2
    with pytest.raises(TypeError, match=r"messages\[0\]: expected a list of messages, not str"):
        read_conversations(["a"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"messages: expected a list of messages, not dict"):
        read_conversations(message)  # type: ignore[arg-type]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ([[{"role": "user", "content": [TEXT, IMAGE]}]], r"messages\[0\]\.content\[1\]"),
        (
            [[{"role": "user", "content": "a"}], [{"role": "user", "content": [IMAGE]}]],
            r"messages\[1\]\[0\]\.content\[0\]",
        ),
    ],
)
def test_an_image_is_refused_before_it_is_lost(given: Any, place: str):
    def ask(requests: Any) -> list[bytes]:
        raise AssertionError(requests)

    with pytest.raises(TypeError, match=f"{place}: image_url is not supported: prompts are texts"):
        Tokenizer(ask, {}).render(given, {})
    with pytest.raises(TypeError, match="image_url is not supported"):
        Tokenizer(ask, {}).apply_chat_template(given[-1])


@pytest.mark.parametrize("content", ["a", None, [TEXT], [{"type": "refusal", "refusal": "a"}]])
def test_texts_reach_the_server(content: Any):
    asked: list[Any] = []

    def ask(requests: Any) -> list[bytes]:
        asked.extend(each.body for each in requests)
        return [b'{"tokens": [1], "prompt": "a"}'] * len(requests)

    messages = [{"role": "user", "content": content}]
    assert Tokenizer(ask, {}).render([messages], {}) == [Prompt("a", [1])]
    assert asked[0] == {"messages": messages}


def test_parameters_are_one_for_all_or_one_for_each():
    assert one_each(3, 2, "n") == [3, 3]
    assert one_each([1, 2], 2, "n") == [1, 2]
    with pytest.raises(ValueError, match="n: 1 for 2 prompts"):
        one_each([1], 2, "n")


def test_an_argument_without_a_counterpart_is_named_unless_it_is_none():
    refuse_arguments("generate", {"mm_processor_kwargs": None}, ())
    with pytest.raises(TypeError, match="generate: mm_processor_kwargs is not supported: prompts"):
        refuse_arguments("generate", {"mm_processor_kwargs": object()}, ())
    with pytest.raises(TypeError, match="did you mean use_tqdm"):
        refuse_arguments("generate", {"use_tdqm": 1}, ("use_tqdm",))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_method_of_vllm_without_a_counterpart_says_so(name: str):
    assert not hasattr(LLM, name)
    with pytest.raises(AttributeError, match=f"LLM.{name} is not supported: "):
        getattr(object.__new__(LLM), name)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_modell_len": 3}, "did you mean max-model-len"),
        ({"max_num_seqs": 0}, "max-num-seqs: 0"),
        ({"api_key": "k"}, "api_key: is for url"),
        ({"revision": "main"}, "revision: needs a model"),
        ({"model": "a", "revision": "b", "url": "http://127.0.0.1:9"}, "revision: needs a model"),
        ({"url": "fish"}, "url: 'fish' is not a URL"),
        ({"url": "http://127.0.0.1:9", "max_num_seqs": 1}, "max_num_seqs: settings are for a mesh"),
    ],
)
def test_a_wrong_setting_is_a_value_error_before_anything_starts(
    settings: dict[str, Any], text: str
):
    with pytest.raises(ValueError, match=text):
        LLM(**settings)


def test_a_server_that_does_not_answer_is_a_connection_error():
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9 does not answer: Connection"):
        LLM(url="http://127.0.0.1:9/v1")


def test_without_logprobs_there_is_no_sum():
    choice = Choice(0, "a", [5], "stop", [1])
    assert choice.output(has_text=True).cumulative_logprob is None
    assert choice.output(has_text=False).text == ""
