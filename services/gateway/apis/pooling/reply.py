"""Replies of a model that pools, as pieces of JSON: vectors may make one large. Pure."""

import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from services.gateway.apis.pooling.parse import PoolingJob
from services.gateway.http.json_reply import encode
from shared.wire.codec import Array
from shared.wire.messages import PoolingInfo


class PooledReply(NamedTuple):
    """``vectors`` [size] float32 of each prompt; their prompts have ``num_tokens``."""

    id: str
    created: int
    asked: PoolingJob
    pooling: PoolingInfo
    vectors: Sequence[Array]
    num_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


def write_embeddings(reply: PooledReply) -> Iterator[bytes]:
    return _list_of(reply, (_vector(reply, "embedding", "embedding", i) for i in _numbers(reply)))


def write_pooled(reply: PooledReply) -> Iterator[bytes]:
    return _list_of(reply, (_vector(reply, "pooling", "data", i) for i in _numbers(reply)))


def write_classes(reply: PooledReply) -> Iterator[bytes]:
    labels = reply.pooling.labels
    return _list_of(
        reply,
        (
            {
                "index": index,
                "label": labels[int(vector.argmax())],
                "probs": vector.tolist(),
                "num_classes": len(vector),
            }
            for index, vector in enumerate(reply.vectors)
        ),
    )


def write_scores(reply: PooledReply) -> Iterator[bytes]:
    return _list_of(
        reply,
        (
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(_scores(reply))
        ),
    )


def write_ranks(reply: PooledReply) -> Iterator[bytes]:
    """The best ``top_n``, in order."""
    scores, texts = _scores(reply), reply.asked.texts
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: reply.asked.top_n]
    head = {"id": reply.id, "model": reply.asked.job.model, "usage": reply.usage}
    yield encode(head)[:-1] + b',"results":['
    for place, index in enumerate(best):
        document = {} if texts is None else {"document": {"text": texts[index]}}
        yield b"," * (place > 0)
        yield encode({"index": index, **document, "relevance_score": scores[index]})
    yield b"]}"


def _numbers(reply: PooledReply) -> range:
    return range(len(reply.vectors))


def _vector(reply: PooledReply, kind: str, field: str, index: int) -> dict[str, Any]:
    vector = reply.vectors[index]
    shown = (
        base64.b64encode(vector.astype("<f4").tobytes()).decode() if reply.asked.is_base64 else None
    )
    return {"object": kind, "index": index, field: vector.tolist() if shown is None else shown}


def _scores(reply: PooledReply) -> list[float]:
    vectors, pairs = reply.vectors, reply.asked.pairs
    if pairs is None:
        return [float(vector[0]) for vector in vectors]
    return [float(np.dot(vectors[first], vectors[second])) for first, second in pairs]


def _list_of(reply: PooledReply, data: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """OpenAI's list, with vLLM's id and time."""
    head = {
        "id": reply.id,
        "object": "list",
        "created": reply.created,
        "model": reply.asked.job.model,
    }
    yield encode(head)[:-1] + b',"data":['
    for index, each in enumerate(data):
        yield b"," * (index > 0) + encode(each)
    yield b'],"usage":%b}' % encode(reply.usage)
