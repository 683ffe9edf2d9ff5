"""Parameters of OpenAI, vLLM, SGLang and FastDeploy without an implementation here.

Each is accepted with null and with its listed neutral values, which change nothing, and refused
otherwise: no parameter is ignored in silence.
"""

from typing import Any

from services.gateway.http.violations import show
from shared.errors import InvalidRequest

Neutral = dict[str, tuple[Any, ...]]

WITHOUT_EFFECT: Neutral = {
    "client_metadata": (),
    "collect_metrics": (False,),
    "guided_decoding_backend": ("auto",),
    "metadata": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "session_id": (),
    "store": (False,),
    "trace_context": (),
    "user": (),
    "verbosity": ("medium",),
}
"""Accepted with any value, without effect; a value other than null and the listed ones is named in
a header of the reply."""

COMMON: Neutral = {
    "best_of": (1,),
    "completion_token_ids": ([],),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "disable_chat_template": (False,),
    "disaggregate_info": (),
    "ec_transfer_params": (),
    "include_logprobs_decode_token": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logits_processors_args": ({},),
    "media_io_kwargs": ({},),
    "mm_hashes": ([],),
    "no_stop_trim": (False,),
    "prompt_token_ids": ([],),
    "response_max_tokens": (),
    "return_hidden_states": (False,),
    "return_mm_kwargs": (True, False),
    "routed_experts_prompt_start": (0,),
    "session_params": (),
    "spaces_between_special_tokens": (True, False),
    "stop_regex": ([],),
    "temp_scaled_logprobs": (False,),
    "top_p_normalized_logprobs": (False,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}

CHAT: Neutral = COMMON | {
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "stream_reasoning": (True,),
    "web_search_options": (),
}

COMPLETION: Neutral = COMMON | {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "return_prompt_text": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}

REASONS = {
    "best_of": "choices are not ranked here; n gives all of them",
    "disable_chat_template": "/v1/completions takes a prompt without a template",
    "include_obfuscation": "no field is added to hide how long a token is",
    "messages": "/v1/chat/completions takes them",
    "prompt_token_ids": "/v1/completions takes token ids as its prompt",
    "temp_scaled_logprobs": "logprobs-mode of the server decides",
    "top_p_normalized_logprobs": "logprobs-mode of the server decides",
}


def refuse_unsupported(fields: dict[str, Any], neutral: Neutral) -> None:
    """Raises InvalidRequest for the first field with a value other than a neutral one."""
    for name, value in fields.items():
        if not _is_neutral(value, neutral[name]):
            allowed = " or ".join(["null", *map(show, neutral[name])])
            raise unsupported(name, value, allowed)


def warnings_of(fields: dict[str, Any]) -> tuple[str, ...]:
    """Names the fields of WITHOUT_EFFECT with a value other than a neutral one."""
    asked = [name for name, value in fields.items() if not _is_neutral(value, WITHOUT_EFFECT[name])]
    return tuple(f"{name}: it changes nothing here" for name in sorted(asked))


def unsupported(param: str, value: Any, allowed: str) -> InvalidRequest:
    reason = REASONS.get(param.rpartition(".")[2])
    why = f" ({reason})" if reason else ""
    return InvalidRequest(
        f"{param} is {show(value)}, which is not supported{why}; allowed: {allowed}",
        param=param,
        code="unsupported_parameter",
    )


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is None or any(_is_same(value, other) for other in neutral)


def _is_same(value: Any, other: Any) -> bool:
    """Equality of JSON values: to Python 1 is True, to a client it is not."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
