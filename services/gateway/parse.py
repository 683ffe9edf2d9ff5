"""The body of a request to a Job, or InvalidRequest (NotFound for the model)."""

import logging
import secrets
from typing import Any, TypeVar

import msgspec
import numpy as np

from services.gateway import unsupported
from services.gateway.job import Job, PromptKind
from services.gateway.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Part,
)
from services.gateway.unsupported import Neutral
from services.gateway.violations import show, unknown_model, violation
from shared.codec import Array
from shared.errors import InvalidRequest
from shared.log import client_text
from shared.messages import ModelInfo, SamplingParams

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=GenerationRequest)


def parse_chat(body: bytes, model: ModelInfo) -> Job:
    """A body of ``/v1/chat/completions``."""
    fields = _decode(body)
    request = _check(fields, ChatRequest, unsupported.CHAT)
    max_tokens = request.max_completion_tokens or request.max_tokens
    messages = [
        _with_text(fields["messages"][index], message, index)
        for index, message in enumerate(request.messages)
    ]
    return _job(request, model, "chat", _bytes(_encode(messages)), max_tokens)


def parse_completion(body: bytes, model: ModelInfo) -> Job:
    """A body of ``/v1/completions``."""
    fields = _decode(body)
    _refuse_many_prompts(fields.get("prompt"))
    request = _check(fields, CompletionRequest, unsupported.COMPLETION)
    if isinstance(request.prompt, str):
        prompt = _bytes(request.prompt.encode())
        return _job(request, model, "text", prompt, request.max_tokens)
    ids = _ids(request.prompt, model.vocab_size)
    return _job(request, model, "ids", ids, request.max_tokens)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"the body is {show(fields)}; expected an object")
    return fields


def _encode(messages: list[dict[str, Any]]) -> bytes:
    try:
        return msgspec.json.encode(messages)
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> InvalidRequest:
    return InvalidRequest("the body is nested too deeply", code="invalid_json")


def _check(fields: dict[str, Any], kind: type[Request], neutral: Neutral) -> Request:
    """The typed request. What no client of OpenAI or vLLM knows is logged and ignored."""
    unsupported.refuse_unsupported(fields, neutral)
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise violation(error, fields) from None
    known = {*kind.__struct_fields__, *neutral, *unsupported.WITHOUT_EFFECT}
    if unknown := fields.keys() - known:
        log.info("ignored unknown fields of a request: %s", client_text(", ".join(sorted(unknown))))
    return request


def _refuse_many_prompts(prompt: Any) -> None:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise unsupported.unsupported("prompt", prompt, "one string or one list of token ids")


def _with_text(fields: dict[str, Any], message: ChatMessage, index: int) -> dict[str, Any]:
    """The message as the client sent it, its content in one string."""
    param = f"messages[{index}].content"
    if message.content is None and not fields.get("tool_calls"):
        raise InvalidRequest(f"{param} is required", param=param)
    if not isinstance(message.content, list):
        return fields
    texts = [_text(part, f"{param}[{number}]") for number, part in enumerate(message.content)]
    return {**fields, "content": "".join(texts)}


def _text(part: Part, param: str) -> str:
    if part.type != "text":
        raise unsupported.unsupported(f"{param}.type", part.type, show("text"))
    if part.text is None:
        raise InvalidRequest(f"{param}.text is required", param=f"{param}.text")
    return part.text


def _ids(ids: list[int], vocab_size: int) -> Array:
    array = np.array(ids, dtype=np.int32)
    outside = np.flatnonzero(array >= vocab_size)
    if outside.size:
        param = f"prompt[{outside[0]}]"
        value = ids[outside[0]]
        raise InvalidRequest(f"{param} is {value}; token ids are below {vocab_size}", param=param)
    return array


def _bytes(text: bytes) -> Array:
    return np.frombuffer(text, dtype=np.uint8)


def _job(
    request: GenerationRequest,
    model: ModelInfo,
    kind: PromptKind,
    prompt: Array,
    max_tokens: int | None,
) -> Job:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is allowed with stream true only", param="stream_options"
        )
    return Job(
        model=_served_name(request.model, model),
        kind=kind,
        prompt=prompt,
        params=_sampling_params(request, max_tokens),
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or [],
        is_stream=bool(request.stream),
        includes_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def _served_name(name: str | None, model: ModelInfo) -> str:
    if name is None:
        return model.names[0]
    if name not in model.names:
        raise unknown_model(name, model.names)
    return name


def _sampling_params(request: GenerationRequest, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(request.top_k or 0, 0),
        top_p=request.top_p or 1.0,
        max_tokens=max_tokens,
        ignore_eos=bool(request.ignore_eos),
    )
