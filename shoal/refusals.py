"""Names of vLLM's offline API without a counterpart here, and unknown names."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

ENGINE = "the engine runs in processes of its own"
POOLING = "use embed, classify or score"
IMAGES = "prompts are texts here; the server takes images: POST /v1/chat/completions"
TEXTS = ("text", "refusal")  # types of parts
ATTRIBUTES = {
    "apply_model": ENGINE,
    "beam_search": "beams are not supported; n gives independent texts",
    "collective_rpc": ENGINE,
    "encode": POOLING,
    "get_metrics": "the server has them: GET /metrics",
    "llm_engine": ENGINE,
    "model_config": "the server has it: GET /v1/models",
    "preprocess_chat": "get_tokenizer().apply_chat_template renders a chat",
    "reset_prefix_cache": "cache_salt separates requests",
    "reward": POOLING,
    "set_tokenizer": "the folder of the model decides",
    "sleep": "close() frees the memory",
    "start_profile": "`shoal bench engine` measures the engine",
    "stop_profile": "`shoal bench engine` measures the engine",
    "wake_up": "close() frees the memory",
}
"""Methods and attributes of vLLM's LLM."""
ARGUMENTS = {
    "mm_processor_kwargs": IMAGES,
    "prompt_adapter_request": "see lora_request",
    "prompt_token_ids": 'a prompt of ids is {"prompt_token_ids": [...]} or the list itself',
    "guided_options_request": "use SamplingParams(structured_outputs=...)",
    "tokenization_kwargs": "use truncate_prompt_tokens of the parameters",
    "chat_template_content_format": "the folder of the model decides",
    "pooling_task": "the model has one task",
}
"""Arguments of vLLM's methods."""


def refuse_arguments(method: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises TypeError for the first argument with a value."""
    for name, value in given.items():
        if name not in ARGUMENTS:
            raise unknown(method, name, known)
        if value is not None and (name, value) != ("chat_template_content_format", "auto"):
            raise TypeError(f"{method}: {name} is not supported: {ARGUMENTS[name]}")


def refuse_parts(messages: Sequence[Any], where: str) -> None:
    """Raises TypeError for the first part of a message that is no text."""
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for index, part in enumerate(content if isinstance(content, list | tuple) else ()):
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind not in TEXTS:
                place = f"{where}[{number}].content[{index}]"
                raise TypeError(f"{place}: {kind} is not supported: {IMAGES}")


def unknown(where: str, name: str, known: Collection[str]) -> TypeError:
    """The error for an argument that does not exist, with the nearest one."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return TypeError(f"{where}: {name} is not an argument{hint}")
