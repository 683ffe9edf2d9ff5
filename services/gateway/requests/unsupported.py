"""Parameters that clients of OpenAI and vLLM know and that are not built here.

Each is accepted with null and with the neutral values written beside it, which change nothing, and
refused otherwise: nothing a client asks for is ignored in silence.
"""

from typing import Any

from services.gateway.requests.violations import show
from shared.errors import InvalidRequest

Neutral = dict[str, tuple[Any, ...]]

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)

_COMMON: Neutral = {
    "best_of": (1,),
    "detokenize": (True,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": ({},),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

CHAT: Neutral = _COMMON | {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True, False),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

COMPLETION: Neutral = _COMMON | {
    "prompt_embeds": (),
    "suffix": ("",),
}

TOKENIZE: Neutral = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "tools": ([],),
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
    return InvalidRequest(
        f"{param} is {show(value)}, which is not supported; allowed: {allowed}",
        param=param,
        code="unsupported_parameter",
    )


def _is_same(value: Any, other: Any) -> bool:
    """Equality of JSON values: to Python 1 is True, to a client it is not."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
