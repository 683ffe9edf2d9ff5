"""Every field of OpenAI's and vLLM's requests is built, neutral and named, or refused by name.
OpenAI's are those of the installed openai package."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsStreaming as ChatCreateParams,
)
from openai.types.completion_create_params import CompletionCreateParamsStreaming
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from services.gateway.apis.pooling import schema as pooling
from services.gateway.apis.pooling.parse import (
    PoolingJob,
    parse_classify,
    parse_embeddings,
    parse_pooling,
)
from services.gateway.apis.pooling.schema import (
    ClassifyRequest,
    EmbeddingRequest,
    RawPoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.apis.pooling.scoring import parse_rerank, parse_score
from services.gateway.apis.responses.requests import schema as responses
from services.gateway.apis.responses.requests.parse import read_request, response_job
from services.gateway.apis.responses.requests.schema import ResponseRequest
from services.gateway.chat.requests import unsupported
from services.gateway.chat.requests.parse import Limits, parse_chat, parse_completion
from services.gateway.chat.requests.schema import ChatRequest, CompletionRequest
from services.gateway.http.body import Body
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest, NotFound
from shared.wire.messages import ModelInfo, PoolingInfo
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.text.asking import STRUCTURED

# Fields of vLLM's ChatCompletionRequest and CompletionRequest, in their order
# (vllm/entrypoints/openai/{chat_completion,completion}/protocol.py, version 0.32.0).
VLLM = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed
    stop stream stream_options temperature top_p user use_beam_search top_k min_p
    repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection thinking_token_budget stream_interval
"""
VLLM_CHAT = """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
    include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents
    chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
"""
VLLM_COMPLETION = """
    prompt suffix prompt_embeds
"""
# Of FastDeploy's requests, without the names above (fastdeploy/entrypoints/openai/protocol.py).
FASTDEPLOY = """
    include_draft_logprobs include_logprobs_decode_token temp_scaled_logprobs
    top_p_normalized_logprobs disaggregate_info bad_words_token_ids logits_processors_args
    guided_json guided_regex guided_choice guided_grammar max_streaming_response_tokens
    prompt_token_ids mm_hashes trace_context collect_metrics
"""
FASTDEPLOY_CHAT = """
    reasoning_max_tokens response_max_tokens structural_tag disable_chat_template
    completion_token_ids
"""
# Of vLLM's requests to models that pool (vllm/entrypoints/pooling/*/protocol.py).
VLLM_POOLING = """
    model user truncate_prompt_tokens padding truncation_side request_id priority
    mm_processor_kwargs cache_salt use_activation
"""
VLLM_INPUT = """
    input messages add_special_tokens add_generation_prompt continue_final_message chat_template
    chat_template_kwargs media_io_kwargs
"""
VLLM_EMBEDDING = """
    encoding_format embed_dtype endianness dimensions
"""


def pooler(task: Literal["embed", "classify"], size: int) -> ModelInfo:
    pooling = PoolingInfo(task, "mean", "none", size, is_matryoshka=True)
    return msgspec.structs.replace(MODEL, runner="pooling", pooling=pooling)


def pooled(
    parse: Callable[[Body, ModelInfo, Limits], PoolingJob], model: ModelInfo
) -> Callable[[Body], Job]:
    return lambda body: parse(body, model, STRUCTURED).job


def response(body: Body) -> Job:
    request = read_request(body)
    return response_job(request, request.items, lambda content: None, MODEL, STRUCTURED)


@dataclass(frozen=True)
class Endpoint:
    """``body`` is a valid request for ``parse``, and ``fields`` are those known to clients."""

    kind: type[msgspec.Struct]
    neutral: unsupported.Neutral
    parse: Callable[[Body], Job]
    body: dict[str, Any]
    fields: set[str]


def names_of(*lists: str) -> set[str]:
    return {*" ".join(lists).split()}


ENDPOINTS = {
    "chat": Endpoint(
        ChatRequest,
        unsupported.CHAT,
        lambda body: parse_chat(body, MODEL, STRUCTURED),
        {"messages": [{"role": "user", "content": "Hi"}]},
        names_of(VLLM, VLLM_CHAT, FASTDEPLOY, FASTDEPLOY_CHAT)
        | ChatCreateParams.__annotations__.keys(),
    ),
    "completion": Endpoint(
        CompletionRequest,
        unsupported.COMPLETION,
        lambda body: parse_completion(body, MODEL, STRUCTURED),
        {"prompt": "a"},
        names_of(VLLM, VLLM_COMPLETION, FASTDEPLOY)
        | CompletionCreateParamsStreaming.__annotations__.keys(),
    ),
    "response": Endpoint(
        ResponseRequest,
        responses.NEUTRAL,
        response,
        {"input": "Hi"},
        {*ResponseCreateParamsStreaming.__annotations__},
    ),
    "embeddings": Endpoint(
        EmbeddingRequest,
        pooling.NEUTRAL,
        pooled(parse_embeddings, pooler("embed", 3)),
        {"input": "a"},
        names_of(VLLM_POOLING, VLLM_INPUT, VLLM_EMBEDDING)
        | EmbeddingCreateParams.__annotations__.keys(),
    ),
    "pooling": Endpoint(
        RawPoolingRequest,
        pooling.NEUTRAL,
        pooled(parse_pooling, pooler("embed", 3)),
        {"input": "a"},
        names_of(VLLM_POOLING, VLLM_INPUT, VLLM_EMBEDDING, "task data"),
    ),
    "classify": Endpoint(
        ClassifyRequest,
        pooling.NEUTRAL,
        pooled(parse_classify, pooler("classify", 3)),
        {"input": "a"},
        names_of(VLLM_POOLING, VLLM_INPUT),
    ),
    "score": Endpoint(
        ScoreRequest,
        pooling.NEUTRAL,
        pooled(parse_score, pooler("classify", 1)),
        {"text_1": "a", "text_2": "b"},
        names_of(VLLM_POOLING, "data_1 data_2 queries documents items text_1 text_2"),
    ),
    "rerank": Endpoint(
        RerankRequest,
        pooling.NEUTRAL,
        pooled(parse_rerank, pooler("classify", 1)),
        {"query": "a", "documents": ["b"]},
        names_of(VLLM_POOLING, "query documents top_n"),
    ),
}
FIELDS = [(name, field) for name, each in ENDPOINTS.items() for field in sorted(each.fields)]
NO_VALUE = 12345.5  # a valid value of no field


def test_the_lists_match_whole_requests() -> None:
    num_fields = {name: len(each.fields) for name, each in ENDPOINTS.items()}
    assert num_fields["chat"] > 70
    assert num_fields["completion"] > 50
    assert num_fields["response"] > 30
    assert num_fields["embeddings"] > 20
    assert all(each.body.keys() <= each.fields for each in ENDPOINTS.values())


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_no_field_is_ignored_in_silence(name: str, field: str) -> None:
    """Endpoints that build it refuse the value, and the others refuse the field."""
    endpoint = ENDPOINTS[name]
    body = json.dumps(endpoint.body | {field: NO_VALUE}).encode()
    if field in unsupported.WITHOUT_EFFECT.keys() - {*endpoint.kind.__struct_fields__}:
        assert endpoint.parse(body).warnings == (f"{field}: it changes nothing here",)
        return
    with pytest.raises((InvalidRequest, NotFound)) as error:
        endpoint.parse(body)
    assert error.value.param == field


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_null_is_the_default_of_a_field_and_not_named(name: str, field: str) -> None:
    endpoint = ENDPOINTS[name]
    if field not in endpoint.body:
        body = json.dumps(endpoint.body | {field: None}).encode()
        assert endpoint.parse(body).warnings == ()


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_a_value_that_changes_nothing_passes_and_is_not_named(endpoint: Endpoint) -> None:
    for field, values in endpoint.neutral.items():
        for value in values:
            body = json.dumps(endpoint.body | {field: value}).encode()
            assert endpoint.parse(body).warnings == ()


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_no_field_is_two_things(endpoint: Endpoint) -> None:
    """Except for a chat's fields that a Response refuses."""
    built = set() if endpoint.kind is ResponseRequest else {*endpoint.kind.__struct_fields__}
    assert not built & endpoint.neutral.keys()
    assert not unsupported.WITHOUT_EFFECT.keys() & endpoint.neutral.keys()
