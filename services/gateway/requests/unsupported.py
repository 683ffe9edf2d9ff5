"""Parameters that clients of OpenAI, vLLM and SGLang know and that are not built here.

Each is accepted with null and with the neutral values written beside it, which change nothing, and
refused otherwise: nothing a client asks for is ignored in silence.
"""

from typing import Any

from services.gateway.requests.violations import show
from shared.errors import InvalidRequest

Neutral = dict[str, tuple[Any, ...]]

WITHOUT_EFFECT = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "user",
    }
)

_COMMON: Neutral = {
    "best_of": (1,),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "session_params": (),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "stream_interval": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

CHAT: Neutral = _COMMON | {
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

COMPLETION: Neutral = _COMMON | {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "messages": (),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}

RESPONSES: Neutral = _COMMON | {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "echo": (False,),
    "include_draft_logprobs": (False,),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}

TOKENIZE: Neutral = {
    "functions": ([],),
    "mm_processor_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
}

POOLING: Neutral = {
    "embed_dtype": ("float32",),
    "embedding_types": (["float"],),
    "endianness": ("native", "little"),
    "late_chunking": (False,),
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "rank_fields": (["text"],),
    "softmax": (),
    "activation": (),
}

REASONS = {
    "best_of": "choices are not ranked here; n gives all of them",
    "include_obfuscation": "no field is added to hide how long a token is",
}


def refuse_unsupported(fields: dict[str, Any], neutral: Neutral) -> None:
    """Raises InvalidRequest for the first field whose value would change something."""
    for name, value in fields.items():
        if name not in neutral or value is None:
            continue
        if not any(_is_same(value, other) for other in neutral[name]):
            allowed = " or ".join(["null", *map(show, neutral[name])])
            raise unsupported(name, value, allowed)


def unsupported(param: str, value: Any, allowed: str) -> InvalidRequest:
    reason = REASONS.get(param.rpartition(".")[2])
    why = f" ({reason})" if reason else ""
    return InvalidRequest(
        f"{param} is {show(value)}, which is not supported{why}; allowed: {allowed}",
        param=param,
        code="unsupported_parameter",
    )


def _is_same(value: Any, other: Any) -> bool:
    """Equality of JSON values: to Python 1 is True, to a client it is not."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
