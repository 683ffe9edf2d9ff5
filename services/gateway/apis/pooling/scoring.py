"""Reads the body of a request for the scores of pairs of texts as a PoolingJob."""

from dataclasses import replace

import msgspec
import numpy as np
from msgspec import Raw

from services.gateway.apis.pooling.parse import MAX_INPUTS, PoolingJob, job_of, pooling_of, warned
from services.gateway.apis.pooling.schema import NEUTRAL, RerankRequest, ScoreRequest
from services.gateway.chat.requests.json_body import check, decode, json_errors, plain
from services.gateway.chat.requests.json_list import is_text, items
from services.gateway.chat.requests.parse import Limits
from services.gateway.chat.requests.raw_json import NULL
from services.gateway.http.body import Body
from services.gateway.http.violations import show
from services.gateway.mesh.job import Prompt
from shared.errors import InvalidRequest
from shared.text.long_json import MAX_VALUES, decode_text
from shared.wire.messages import ModelInfo, Pooling, PoolingInfo, SamplingParams

MAX_PAIR_BYTES = 64 << 20  # of a query as often as it has documents


def parse_score(body: Body, model: ModelInfo, limits: Limits) -> PoolingJob:
    """A body of ``/score``: one text paired with one or several others, or two lists of equal
    length."""
    fields = decode(body)
    request = check(fields, ScoreRequest, NEUTRAL)
    names, others = ("text_1", "text_2"), ("queries", "documents")
    if request.text_1 == NULL and (request.queries != NULL or request.documents != NULL):
        names, others = others, names
    for other in others:
        if getattr(request, other) != NULL:
            raise InvalidRequest(
                f"{other} is not allowed beside {names[0]}: one pair of fields has the texts",
                param=other,
            )
    firsts, seconds = (_texts(getattr(request, name), name) for name in names)
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(
            f"{names[0]} has {len(firsts)} texts and {names[1]} {len(seconds)}; expected one of the"
            " first, or as many of both",
            param=names[0],
        )
    job = _pairs(request, (firsts, seconds), names, model, limits)
    return warned(job, fields, ScoreRequest)


def parse_rerank(body: Body, model: ModelInfo, limits: Limits) -> PoolingJob:
    """A body of ``/rerank``."""
    fields = decode(body)
    request = check(fields, RerankRequest, NEUTRAL)
    if not request.query:
        raise InvalidRequest('query is ""; expected str of length >= 1', param="query")
    documents = items(request.documents, "documents", MAX_INPUTS, _document, max_values=MAX_VALUES)
    queries = [request.query] * len(documents)
    job = _pairs(request, (queries, documents), ("query", "documents"), model, limits)
    texts = None if request.return_documents is False else documents
    job = replace(job, texts=texts, top_n=request.top_n or len(documents))
    return warned(job, fields, RerankRequest)


def _pairs(
    request: ScoreRequest | RerankRequest,
    texts: tuple[list[str], list[str]],
    names: tuple[str, str],
    model: ModelInfo,
    limits: Limits,
) -> PoolingJob:
    """A scoring model reads both texts at once; with embeddings the score is the cosine. ``names``
    are the fields of the ``texts``."""
    pooling = pooling_of(model)
    if pooling.task == "embed":
        return _embedded_pairs(request, texts, names, model, pooling, limits)
    if pooling.size != 1:
        raise InvalidRequest(
            f"the model {model.names[0]} has {pooling.size} classes (/classify); one of scores has"
            " a single one",
            param="model",
        )
    num_bytes = sum(len(each.encode()) for each in texts[0] + texts[1])
    if num_bytes > MAX_PAIR_BYTES:
        raise InvalidRequest(
            f"the {len(texts[0])} pairs have {num_bytes} bytes; the limit is {MAX_PAIR_BYTES}",
            param=names[1],
        )
    instructions = [request.instruction] if request.instruction else []
    prompts = [
        Prompt("pair", np.frombuffer(msgspec.json.encode([*pair, *instructions]), np.uint8))
        for pair in zip(*texts, strict=True)
    ]
    params = [f"{names[1]}[{number}]" for number in range(len(prompts))]
    return PoolingJob(job_of(request, prompts, model, pooling, limits), params)


def _embedded_pairs(
    request: ScoreRequest | RerankRequest,
    texts: tuple[list[str], list[str]],
    names: tuple[str, str],
    model: ModelInfo,
    pooling: PoolingInfo,
    limits: Limits,
) -> PoolingJob:
    """Equal texts of the first kind are embedded once."""
    if request.instruction is not None:
        raise InvalidRequest(
            "instruction is for models of scores; this one gives embeddings, of which the cosine is"
            " the score: put it before the query",
            param="instruction",
        )
    firsts = {text: number for number, text in enumerate(dict.fromkeys(texts[0]))}
    prompts = [
        Prompt("text", np.frombuffer(text.encode(), np.uint8)) for text in [*firsts, *texts[1]]
    ]
    job = job_of(request, prompts, model, pooling, limits)
    cosine = Pooling(pooling.pooling_type, "normalize")
    return PoolingJob(
        replace(job, params=SamplingParams(seed=0, max_tokens=0, pooling=cosine)),
        params=[names[0]] * len(firsts)
        + [f"{names[1]}[{number}]" for number in range(len(texts[1]))],
        pairs=[(firsts[text], len(firsts) + number) for number, text in enumerate(texts[0])],
    )


@json_errors()
def _texts(raw: Raw, param: str) -> list[str]:
    if raw == NULL:
        raise InvalidRequest(f"{param} is required", param=param)
    if is_text(raw):
        return [_text(raw, param)]
    return items(raw, param, MAX_INPUTS, lambda number, value: _text(value, f"{param}[{number}]"))


class _Document(msgspec.Struct):
    text: Raw


def _document(number: int, raw: Raw) -> str:
    param = f"documents[{number}]"
    try:
        document = msgspec.json.decode(raw, type=_Document)
    except msgspec.ValidationError:
        return _text(raw, param)
    if is_text(document.text):
        return _text(document.text, f"{param}.text")
    return _text(raw, param)


def _text(raw: Raw, param: str) -> str:
    if is_text(raw) and (text := decode_text(memoryview(raw))):
        return text
    raise InvalidRequest(f"{param} is {show(plain(raw))}; expected str of length >= 1", param=param)
