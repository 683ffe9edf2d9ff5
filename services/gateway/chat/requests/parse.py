"""The body of a request to a Job, or InvalidRequest (NotFound for the model)."""

from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from services.gateway.chat.media import NO_MEDIA, Media
from services.gateway.chat.requests import unsupported
from services.gateway.chat.requests.chat_options import NO_LIMIT, chat_options, requested_limit
from services.gateway.chat.requests.chat_prompt import chat_prompt
from services.gateway.chat.requests.json_body import check, decode, in_vain, served_name
from services.gateway.chat.requests.options import promise_of, request_options, retention_of
from services.gateway.chat.requests.output_format import output_format
from services.gateway.chat.requests.prompts import completion_prompts, final_assistant_text
from services.gateway.chat.requests.sampling import (
    client_seed,
    num_logprobs,
    sampling_params,
    text_options,
)
from services.gateway.chat.requests.schema import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.chat.structure import NoStructure, Structure
from services.gateway.http.body import Body
from services.gateway.mesh.job import Job, Prompt
from shared.errors import InvalidRequest
from shared.wire.envelope import Promise
from shared.wire.messages import ALL_TOKENS, ModelInfo, TextOptions


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, from the settings, and optional parts for chats. ``promise`` is to its
    API key, without keys to all."""

    max_choices: int
    max_logprobs: int
    max_priority_boost: int = 0
    history_limit: int = NO_LIMIT
    structure: Structure = field(default_factory=NoStructure)
    promise: Promise = field(default_factory=Promise)
    media: Media = NO_MEDIA


def parse_chat(body: Body, model: ModelInfo, limits: Limits) -> Job:
    """A body of ``/v1/chat/completions``."""
    fields = decode(body)
    job = chat_job(check(fields, ChatRequest, unsupported.CHAT), model, limits)
    return replace(job, warnings=in_vain(fields, ChatRequest, unsupported.CHAT))


def chat_job(request: ChatRequest, model: ModelInfo, limits: Limits) -> Job:
    """Raises InvalidRequest (NotFound for the model) with the names of a chat's fields."""
    prompts = [chat_prompt(request, limits.media, model)]
    names = {"prompt": "messages"}
    if request.max_completion_tokens is not None:
        request.max_tokens = request.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    logprobs = num_logprobs(_top_logprobs(request), "top_logprobs", limits.max_logprobs, model)
    tools = limits.structure.tools(request, model)
    parsing = limits.structure.parsing(request, tools, model)
    options = text_options(request, model, adds_special_tokens=False, has_marks=parsing is not None)
    history = requested_limit(request, limits.history_limit, request.max_tokens, model)
    job = _job(request, prompts, model, limits, logprobs, options)
    if tools.is_legacy:
        names |= {"tools": "functions", "tool_choice": "function_call"}
    return replace(
        job,
        field_names=names | job.field_names,
        chat=chat_options(request, tools.tools, reasoning_kwargs(request), history),
        tool_choice=tools.choice,
        parsing=parsing,
        first_text=final_assistant_text(prompts[0]) if request.echo else "",
        returns_prompt_text=bool(request.return_prompt_text),
    )


def parse_completion(body: Body, model: ModelInfo, limits: Limits) -> Job:
    """A body of ``/v1/completions``."""
    fields = decode(body)
    request = check(fields, CompletionRequest, unsupported.COMPLETION)
    is_cut = request.truncate_prompt_tokens is not None
    prompts = completion_prompts(request.prompt, model, limits.max_choices, is_cut)
    logprobs = num_logprobs(request.logprobs, "logprobs", limits.max_logprobs, model)
    options = text_options(request, model, adds_special_tokens=True)
    job = _job(request, prompts, model, limits, logprobs, options)
    job = replace(
        job,
        logprobs_by_id=bool(request.logprobs_by_token_id),
        warnings=in_vain(fields, CompletionRequest, unsupported.COMPLETION),
    )
    return _echoing(job, logprobs) if request.echo else job


def _echoing(job: Job, logprobs: int | None) -> Job:
    """The prompt's tokens have ``logprobs`` like the text's tokens; the mesh sends the larger of
    this number and ``prompt_logprobs``."""
    numbers = [num for num in (logprobs, job.params.prompt_logprobs) if num is not None]
    if logprobs is None:
        return replace(job, echoes=True)
    num = ALL_TOKENS if ALL_TOKENS in numbers else max(numbers)
    params = structs.replace(job.params, prompt_logprobs=num)
    return replace(job, echoes=True, num_echoed_logprobs=logprobs, params=params)


def _top_logprobs(request: ChatRequest) -> int | None:
    """The number that the client asked for, or None."""
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidRequest(
            f"top_logprobs is {request.top_logprobs}; it is only allowed if logprobs is true",
            param="top_logprobs",
        )
    return None


def _job(
    request: GenerationRequest,
    prompts: list[Prompt],
    model: ModelInfo,
    limits: Limits,
    logprobs: int | None,
    text: TextOptions,
) -> Job:
    _check_stream(request)
    _check_drafts(request, logprobs)
    budget, budget_param = reasoning_budget(request, model)
    asked = request.prompt_logprobs
    prompt_logprobs = num_logprobs(asked, "prompt_logprobs", limits.max_logprobs, model)
    return Job(
        model=served_name(request.lora_path or request.model, model),
        prompts=prompts,
        num_choices=_num_choices(request.n, len(prompts), limits.max_choices),
        params=sampling_params(request, model, logprobs, prompt_logprobs),
        text=text,
        options=request_options(
            request,
            limits.max_priority_boost,
            promise_of(request, limits.promise),
            retention_of(request),
        ),
        is_stream=bool(request.stream),
        includes_usage=bool(request.stream_options and request.stream_options.include_usage),
        returns_ids=bool(request.return_token_ids),
        returns_offsets=bool(request.return_token_offsets),
        names_by_id=bool(request.return_tokens_as_token_ids),
        num_prompt_logprobs=prompt_logprobs,
        is_seeded=client_seed(request) is not None,
        request_id=request.request_id,
        format=output_format(request),
        reasoning_budget=budget,
        field_names={"reasoning_budget": budget_param} if budget_param else {},
        repeats_usage=_repeats_usage(request),
        stream_interval=request.stream_interval or request.max_streaming_response_tokens or 1,
    )


def _check_stream(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is allowed with stream true only", param="stream_options"
        )
    if options is not None and options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise unsupported.unsupported(param, True, "null or false")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest(
            f"prompt_logprobs is {request.prompt_logprobs}; it is allowed without stream only",
            param="prompt_logprobs",
        )


def _repeats_usage(request: GenerationRequest) -> bool:
    """In addition to include_usage, as vLLM does."""
    options = request.stream_options
    return bool(options and options.include_usage and options.continuous_usage_stats)


def _check_drafts(request: GenerationRequest, logprobs: int | None) -> None:
    if request.include_draft_logprobs and logprobs is None:
        raise InvalidRequest(
            "include_draft_logprobs is true; it is allowed with logprobs only",
            param="include_draft_logprobs",
        )


def _num_choices(n: int | None, num_prompts: int, max_choices: int) -> int:
    num_choices = 1 if n is None else n
    if num_choices * num_prompts > max_choices:
        prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        raise InvalidRequest(
            f"n is {num_choices}, for {prompts}: {num_choices * num_prompts} choices;"
            f" the limit is max-choices = {max_choices}",
            param="prompt" if num_choices == 1 else "n",
        )
    return num_choices


SWITCHES = ("enable_thinking", "thinking")
"""Names in chat templates of the variable that turns reasoning on or off."""


def reasoning_kwargs(request: ChatRequest) -> dict[str, Any]:
    """The variables that tell a chat template how much to reason."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | dict.fromkeys(SWITCHES, effort != "none")


def reasoning_budget(request: GenerationRequest, model: ModelInfo) -> tuple[int | None, str]:
    """The most tokens of reasoning, and the field that says so. Raises InvalidRequest."""
    custom = request.custom_params
    given = {
        "thinking_token_budget": request.thinking_token_budget,
        "reasoning_max_tokens": request.reasoning_max_tokens,
        "custom_params.thinking_budget": custom.thinking_budget if custom is not None else None,
    }
    budgets = [(param, budget) for param, budget in given.items() if budget not in (None, -1)]
    if not budgets:
        return None, ""
    (param, budget), *others = budgets
    if others:
        raise InvalidRequest(f"{param} and {others[0][0]} are both given", param=param)
    if not model.reasoning_parser:
        raise InvalidRequest(
            f"{param} is {budget}; this model has no reasoning-parser", param=param
        )
    if budget and isinstance(request, ChatRequest) and request.reasoning_effort == "none":
        raise InvalidRequest(f'{param} is {budget}, and reasoning_effort is "none"', param=param)
    return budget, param
