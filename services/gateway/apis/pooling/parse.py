"""Reads the body of a request for vectors or classes: a Job, and the form of the reply."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import Raw

from services.gateway.apis.pooling.schema import (
    NEUTRAL,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RawPoolingRequest,
)
from services.gateway.chat.requests.json_body import Fields, check, decode, in_vain, served_name
from services.gateway.chat.requests.options import request_options
from services.gateway.chat.requests.parse import Limits
from services.gateway.chat.requests.prompts import completion_prompts, is_one_prompt
from services.gateway.http.body import Body
from services.gateway.mesh.job import Job, Prompt
from shared.errors import InvalidRequest
from shared.wire.messages import (
    Activation,
    ModelInfo,
    Pooling,
    PoolingInfo,
    SamplingParams,
    TextOptions,
)

MAX_INPUTS = 2048
MAX_OPEN_INPUTS = 256
"""The limit of one request's inputs in the mesh at once: enough for a large step, with room for
other requests."""
NOT_POOLING = "model_does_not_pool"
ALL_THAT_FIT = -1  # as truncate_prompt_tokens


@dataclass(frozen=True, slots=True)
class PoolingJob:
    """``job``, and the fields ``params`` of its prompts.

    The reply shows each vector, or with ``pairs`` the score of the two vectors with these numbers.
    ``texts`` are the documents to show with their scores; ``top_n`` of them are wanted.
    """

    job: Job
    params: list[str]
    is_base64: bool = False
    pairs: list[tuple[int, int]] | None = None
    texts: list[str] | None = None
    top_n: int | None = None


def parse_embeddings(body: Body, model: ModelInfo, limits: Limits) -> PoolingJob:
    """A body of ``/v1/embeddings``."""
    fields = decode(body)
    request = check(fields, EmbeddingRequest, NEUTRAL)
    pooling = pooling_of(model)
    _check_task(pooling, "embed", "/v1/embeddings")
    return warned(_vectors(request, model, pooling, limits), fields, EmbeddingRequest)


def parse_pooling(body: Body, model: ModelInfo, limits: Limits) -> PoolingJob:
    """A body of ``/pooling``, for a model of vectors or of classes."""
    fields = decode(body)
    request = check(fields, RawPoolingRequest, NEUTRAL)
    pooling = pooling_of(model)
    if request.task is not None:
        _check_task(pooling, "embed" if request.task == "embed" else "classify", request.task)
    return warned(_vectors(request, model, pooling, limits), fields, RawPoolingRequest)


def parse_classify(body: Body, model: ModelInfo, limits: Limits) -> PoolingJob:
    """A body of ``/classify``."""
    fields = decode(body)
    request = check(fields, ClassifyRequest, NEUTRAL)
    pooling = pooling_of(model)
    _check_task(pooling, "classify", "/classify")
    prompts, params = _inputs(request.input, request, model)
    job = PoolingJob(job_of(request, prompts, model, pooling, limits), params)
    return warned(job, fields, ClassifyRequest)


def warned(asked: PoolingJob, fields: Fields, kind: type[PoolingRequest]) -> PoolingJob:
    """With the names of ignored fields."""
    warnings = in_vain(fields, kind, NEUTRAL)
    return replace(asked, job=replace(asked.job, warnings=warnings))


def _vectors(
    request: EmbeddingRequest, model: ModelInfo, pooling: PoolingInfo, limits: Limits
) -> PoolingJob:
    prompts, params = _inputs(request.input, request, model)
    num_dims = _num_dims(request.dimensions, pooling)
    job = job_of(request, prompts, model, pooling, limits, num_dims)
    return PoolingJob(job, params, is_base64=request.encoding_format == "base64")


def job_of(
    request: PoolingRequest,
    prompts: list[Prompt],
    model: ModelInfo,
    pooling: PoolingInfo,
    limits: Limits,
    num_dims: int = 0,
) -> Job:
    """Raises InvalidRequest."""
    wanted = Pooling(pooling.pooling_type, _activation(request, pooling), num_dims)
    return Job(
        model=served_name(request.model, model),
        prompts=prompts,
        num_choices=1,
        params=SamplingParams(seed=0, max_tokens=0, pooling=wanted),
        text=TextOptions(
            adds_special_tokens=request.add_special_tokens is not False,
            max_prompt_tokens=_max_prompt_tokens(request.truncate_prompt_tokens, model),
            keeps_prompt_start=request.truncation_side != "left",
        ),
        options=request_options(request, limits.max_priority_boost),
        is_stream=False,
        includes_usage=False,
        request_id=request.request_id,
        max_open_prompts=MAX_OPEN_INPUTS,
    )


def _inputs(raw: Raw, request: PoolingRequest, model: ModelInfo) -> tuple[list[Prompt], list[str]]:
    """The prompts, and the field that each is from."""
    is_cut = request.truncate_prompt_tokens is not None
    prompts = completion_prompts(raw, model, MAX_INPUTS, is_cut, "input", "")
    if is_one_prompt(raw):
        return prompts, ["input"]
    return prompts, [f"input[{number}]" for number in range(len(prompts))]


def _check_task(pooling: PoolingInfo, task: str, name: str) -> None:
    if pooling.task == task:
        return
    gives = "embeddings" if pooling.task == "embed" else "classes or scores"
    raise InvalidRequest(f"the model gives {gives}, which {name} is not for", param="model")


def _activation(request: PoolingRequest, pooling: PoolingInfo) -> Activation:
    asked = request.use_activation if request.normalize is None else request.normalize
    if asked is None:
        return pooling.activation
    if not asked or pooling.activation != "none":
        return pooling.activation if asked else "none"
    if pooling.task == "embed":
        return "normalize"
    return "sigmoid" if pooling.size == 1 else "softmax"


def _num_dims(asked: int | None, pooling: PoolingInfo) -> int:
    """The requested number of dimensions; 0: all. Raises InvalidRequest for a number that the
    model's embeddings cannot be cut to."""
    if asked is None or asked == pooling.size:
        return 0
    text = f"dimensions is {asked}; the model's embeddings have {pooling.size}"
    if asked > pooling.size:
        raise InvalidRequest(text, param="dimensions")
    allowed: Sequence[int] = pooling.dimensions
    if allowed and asked not in allowed:
        names = ", ".join(map(str, allowed))
        raise InvalidRequest(f"{text}, or one of {names}", param="dimensions")
    if not allowed and not pooling.is_matryoshka:
        raise InvalidRequest(
            f"{text} and are not made to be cut (is_matryoshka in pooler-config says that they"
            " are)",
            param="dimensions",
        )
    return asked


def _max_prompt_tokens(asked: int | None, model: ModelInfo) -> int | None:
    """None: a prompt is not cut. Raises InvalidRequest."""
    limit = model.max_model_len
    if asked == ALL_THAT_FIT:
        return limit
    if asked is None or 1 <= asked <= limit:
        return asked
    raise InvalidRequest(
        f"truncate_prompt_tokens is {asked}; expected -1, or 1 to max-model-len = {limit}",
        param="truncate_prompt_tokens",
    )


def pooling_of(model: ModelInfo) -> PoolingInfo:
    """The model's pooling. Raises InvalidRequest for a model that writes texts."""
    if model.pooling is None:
        raise InvalidRequest(
            f"{model.names[0]} is a text-generation model: start the server with --runner pooling"
            " for embeddings, also with classifier_from_token in --pooler-config for scores",
            param="model",
            code=NOT_POOLING,
        )
    return model.pooling
