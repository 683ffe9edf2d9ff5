"""The sampling of a request: its own values, otherwise the model's defaults."""

import re
import secrets
from typing import Any, TypeVar

from msgspec.structs import asdict

from services.gateway.chat.requests.schema import GenerationRequest, RepetitionDetection
from services.gateway.chat.requests.token_ids import known_ids
from services.gateway.http.violations import show
from shared.errors import InvalidRequest
from shared.wire.messages import (
    ALL_TOKENS,
    MAX_PATTERN_COUNT,
    ModelInfo,
    Repetition,
    SamplingParams,
    TextOptions,
)
from shared.wire.sampling_fields import with_fields

MAX_BIAS = 100
NO_SEED = -1
ALL_THAT_FIT = -1  # as truncate_prompt_tokens

_ID = re.compile("0|[1-9][0-9]{0,9}")

Value = TypeVar("Value")


def sampling_params(
    request: GenerationRequest,
    model: ModelInfo,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Raises InvalidRequest. Without a seed from the client one is drawn here, for all choices."""
    seed, min_tokens = client_seed(request), _or(request.min_tokens, 0)
    logprob_ids = [*dict.fromkeys(_ids(request.logprob_token_ids, model, "logprob_token_ids"))]
    if logprob_ids and logprobs is None:
        raise InvalidRequest(
            f"logprob_token_ids is {show(logprob_ids)}; it is allowed with logprobs only",
            param="logprob_token_ids",
        )
    if request.max_tokens is not None and min_tokens > request.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}; max_tokens is {request.max_tokens}", param="min_tokens"
        )
    return SamplingParams(
        seed=secrets.randbits(63) if seed is None else seed,
        **asdict(with_fields(model.defaults, request)),
        max_tokens=request.max_tokens,
        ignore_eos=bool(request.ignore_eos),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        min_tokens=min_tokens,
        stop_token_ids=_ids(request.stop_token_ids, model, "stop_token_ids"),
        allowed_token_ids=_ids(request.allowed_token_ids, model, "allowed_token_ids"),
        bad_words=[
            [each] for each in _ids(request.bad_words_token_ids, model, "bad_words_token_ids")
        ],
        logit_bias=_biases(request.logit_bias or {}, model.vocab_size),
        logprobs=len(logprob_ids) or logprobs,
        logprob_token_ids=logprob_ids,
        prompt_logprobs=prompt_logprobs,
        draft_logprobs=bool(request.include_draft_logprobs),
        repetition=_repetition(request.repetition_detection),
    )


def client_seed(request: GenerationRequest) -> int | None:
    """−1 means none."""
    return None if request.seed == NO_SEED else request.seed


def text_options(
    request: GenerationRequest,
    model: ModelInfo,
    adds_special_tokens: bool,
    has_marks: bool = False,
) -> TextOptions:
    """``adds_special_tokens`` is the default for a request without a value. Raises
    InvalidRequest."""
    return TextOptions(
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or [],
        bad_words=request.bad_words or [],
        includes_stop=bool(request.include_stop_str_in_output),
        skips_special_tokens=_or(request.skip_special_tokens, True),
        adds_special_tokens=_or(request.add_special_tokens, adds_special_tokens),
        has_marks=has_marks,
        max_prompt_tokens=max_prompt_tokens(
            request.truncate_prompt_tokens, _or(request.max_tokens, 1), model
        ),
        keeps_prompt_start=request.truncation_side == "right",
    )


def max_prompt_tokens(asked: int | None, max_tokens: int, model: ModelInfo) -> int | None:
    """The value of truncate_prompt_tokens for the mesh; None: a prompt is not cut. Raises
    InvalidRequest if it leaves no room for a text of ``max_tokens``."""
    limit = model.max_model_len - max_tokens
    if asked is None or 1 <= asked <= limit:
        return asked
    if asked == ALL_THAT_FIT and limit > 0:
        return limit
    expected = f"-1, or 1 to {limit}" if limit > 0 else "null"
    room = f", and max_tokens is {max_tokens}" if max_tokens else ""
    raise InvalidRequest(
        f"truncate_prompt_tokens is {asked}; expected {expected}: the context holds"
        f" {model.max_model_len} tokens (max-model-len){room}",
        param="truncate_prompt_tokens",
    )


def num_logprobs(asked: int | None, param: str, max_logprobs: int, model: ModelInfo) -> int | None:
    """Raises InvalidRequest above ``max_logprobs``; −1, there and then here: the whole
    vocabulary."""
    is_unbounded = max_logprobs == ALL_TOKENS
    limit = model.vocab_size if is_unbounded else min(max_logprobs, model.vocab_size)
    if asked is None or 0 <= asked <= limit or (is_unbounded and asked == ALL_TOKENS):
        return asked
    raise InvalidRequest(
        f"{param} is {asked}; expected 0 to {limit} (max-logprobs is {max_logprobs})", param=param
    )


def _repetition(asked: RepetitionDetection | None) -> Repetition | None:
    """Raises InvalidRequest."""
    if asked is None or not (longest := asked.max_pattern_size):
        return None
    for name, value, least, most in (
        ("min_pattern_size", asked.min_pattern_size, 0, longest),
        ("min_count", asked.min_count, 2, MAX_PATTERN_COUNT),
    ):
        if not least <= value <= most:
            param = f"repetition_detection.{name}"
            expected = f"expected {least} to {most}, with a max_pattern_size of {longest}"
            raise InvalidRequest(f"{param} is {value}; {expected}", param=param)
    return Repetition(longest, max(1, asked.min_pattern_size), asked.min_count)


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _ids(ids: list[int] | None, model: ModelInfo, param: str) -> list[int]:
    known_ids(ids or [], model.vocab_size, param)
    return ids or []


def _biases(biases: dict[str, Any], vocab_size: int) -> list[tuple[int, float]]:
    return [_bias(key, value, vocab_size) for key, value in biases.items()]


def _bias(key: str, value: Any, vocab_size: int) -> tuple[int, float]:
    if not _ID.fullmatch(key) or int(key) >= vocab_size:
        raise InvalidRequest(
            f"logit_bias has the key {show(key)}; keys are token ids below {vocab_size}",
            param="logit_bias",
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_BIAS <= value <= MAX_BIAS:
        raise InvalidRequest(
            f"logit_bias.{key} is {show(value)}; expected a number from -{MAX_BIAS} to {MAX_BIAS}",
            param=f"logit_bias.{key}",
        )
    return int(key), float(value)
