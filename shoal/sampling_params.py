"""Parameters of requests, with vLLM's names and defaults.

The server checks values; this module knows names alone.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from shoal.refusals import unknown

Params = TypeVar("Params")

Neutral = Mapping[str, tuple[tuple[Any, ...], str]]
SAMPLING_NEUTRAL: Neutral = {
    "best_of": ((1,), "texts are not ranked; n gives all of them"),
    "early_stopping": ((False,), "beams are not supported"),
    "extra_args": (({},), "no foreign code is loaded"),
    "flat_logprobs": ((False,), "logprobs are lists of dicts"),
    "length_penalty": ((1.0,), "beams are not supported"),
    "logits_processors": (([],), "no foreign code is loaded"),
    "output_kind": ((0, 1, 2), "results are complete"),
    "prompt_logprob_start": ((0,), "prompt_logprobs has all tokens of the prompt"),
    "prompt_logprob_token_ids": ((), "prompt_logprobs has the likeliest tokens"),
    "routed_experts_prompt_start": ((0,), "the choice of experts is not returned"),
    "skip_clone": ((True, False), "parameters are never changed"),
    "skip_reading_prefix_cache": ((False,), "cache_salt separates requests"),
    "stream_interval": ((1,), "results are complete"),
    "trace_decode_token_ids": ((), "outputs cannot be forced"),
    "use_beam_search": ((False,), "beams are not supported"),
}
"""Parameters of vLLM without a counterpart: the values that change nothing, and the reason."""
POOLING_NEUTRAL: Neutral = {
    "task": ((), "the model has one task"),
    "extra_kwargs": (({},), "no foreign code is loaded"),
}


def refusing(neutral: Neutral) -> Callable[[type[Params]], type[Params]]:
    """Makes the constructor accept the ``neutral`` values of further names, and raise TypeError for
    other values and unknown names."""

    def decorated(cls: type[Params]) -> type[Params]:
        initialize = cls.__init__
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]

        @functools.wraps(initialize)
        def checked(self: Params, *values: Any, **named: Any) -> None:
            for name in named.keys() - known:
                _refuse(cls.__name__, name, named.pop(name), known, neutral)
            initialize(self, *values, **named)

        cls.__init__ = checked  # type: ignore[assignment,method-assign]
        return cls

    return decorated


def _refuse(where: str, name: str, value: Any, known: set[str], neutral: Neutral) -> None:
    if name not in neutral:
        raise unknown(where, name, known)
    allowed, reason = neutral[name]
    if value is not None and getattr(value, "value", value) not in allowed:
        raise TypeError(f"{where}: {name}={value!r} is not supported: {reason}")


@refusing({})
@dataclass(slots=True)
class StructuredOutputsParams:
    """One of the first six sets the form of the text."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def body(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, False)}


GuidedDecodingParams = StructuredOutputsParams  # vLLM's name before 0.11


@refusing(SAMPLING_NEUTRAL)
@dataclass(slots=True)
class SamplingParams:
    """The defaults are vLLM's. None is the default of the server: for ``max_tokens`` the rest of
    the context, for ``temperature`` and others the value in generation_config.json.

    ``guided_decoding`` is a synonym of ``structured_outputs``. ``top_n_sigma``, ``cache_salt``,
    ``slo`` and ``truncate_prompt_tokens`` are fields of our HTTP API.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = 1.0
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | dict[str, Any] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, int] | None = None
    truncate_prompt_tokens: int | None = None
    top_n_sigma: float | None = None
    cache_salt: str | None = None
    slo: dict[str, float] | None = None

    @classmethod
    def of_model(cls) -> "SamplingParams":
        """The values of the model's generation_config.json."""
        return cls(temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=None)

    def body(self) -> dict[str, Any]:
        """The fields of a request to ``/v1/completions``."""
        own = ("detokenize", "structured_outputs", "guided_decoding", "logit_bias")
        names = [field.name for field in fields(self) if field.name not in own]
        body = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logprobs is not None or self.logprob_token_ids:
            body |= {"logprobs": self.logprobs or 0, "logprobs_by_token_id": True}
        if self.logit_bias is not None:
            body["logit_bias"] = {str(key): value for key, value in self.logit_bias.items()}
        form = self.structured_outputs or self.guided_decoding
        if form is not None:
            body["structured_outputs"] = form if isinstance(form, dict) else form.body()
        return body


@refusing(POOLING_NEUTRAL)
@dataclass(slots=True)
class PoolingParams:
    """Parameters of ``embed``, ``classify`` and ``score``; None is the model's default."""

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None

    def body(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def pooling_body(params: PoolingParams | None) -> dict[str, Any]:
    """The fields of a request. Raises TypeError for parameters of another type, also for a list:
    they apply to all prompts."""
    if params is None:
        return {}
    if not isinstance(params, PoolingParams):
        name = type(params).__name__
        raise TypeError(f"pooling_params is a {name}; expected one PoolingParams for all prompts")
    return params.body()
