"""Every field of OpenAI's and vLLM's requests is built, neutral and named, or refused by name: none
falls through."""

from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses

from services.gateway.requests import unsupported
from services.gateway.requests.items.schema import ResponseRequest
from services.gateway.requests.schema import ChatRequest, CompletionRequest

# Of vLLM's ChatCompletionRequest and CompletionRequest, in their order.
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
REQUESTS: list[Any] = [
    (ChatRequest, unsupported.CHAT, [*chats.CompletionCreateParamsBase.__annotations__]),
    (ChatRequest, unsupported.CHAT, [*VLLM.split(), *VLLM_CHAT.split()]),
    (
        CompletionRequest,
        unsupported.COMPLETION,
        [*completions.CompletionCreateParamsBase.__annotations__],
    ),
    (CompletionRequest, unsupported.COMPLETION, [*VLLM.split(), *VLLM_COMPLETION.split()]),
    (
        ResponseRequest,
        unsupported.RESPONSES,
        [*responses.ResponseCreateParamsBase.__annotations__],
    ),
]


@pytest.mark.parametrize(("kind", "neutral", "fields"), REQUESTS)
def test_every_field_is_known(kind: Any, neutral: unsupported.Neutral, fields: list[str]) -> None:
    assert len(fields) > 15
    known = {*kind.__struct_fields__, *neutral, *unsupported.WITHOUT_EFFECT}
    assert set(fields) - known == set()


@pytest.mark.parametrize(("kind", "neutral"), [each[:2] for each in REQUESTS])
def test_no_field_is_two_things(kind: Any, neutral: unsupported.Neutral) -> None:
    """But those of a chat that a Response refuses."""
    built = set() if kind is ResponseRequest else {*kind.__struct_fields__}
    assert not built & neutral.keys()
    assert not unsupported.WITHOUT_EFFECT.keys() & neutral.keys()
