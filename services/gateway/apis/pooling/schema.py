"""The body of a request to a model that pools, with the limits; null means the default."""

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

from services.gateway.chat.requests.raw_json import NULL
from services.gateway.chat.requests.schema import (
    MAX_INT32,
    CacheSalt,
    NumTokens,
    Priority,
    RequestId,
)
from services.gateway.chat.requests.unsupported import Neutral


class PoolingRequest(Struct, kw_only=True):
    """The fields shared by all endpoints. ``use_activation`` is vLLM's word for ``normalize``."""

    model: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None


class EmbeddingRequest(PoolingRequest, kw_only=True):
    input: Raw
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: NumTokens | None = None


class RawPoolingRequest(EmbeddingRequest, kw_only=True):
    task: Literal["embed", "classify", "score"] | None = None


class ClassifyRequest(PoolingRequest, kw_only=True):
    input: Raw


class ScoreRequest(PoolingRequest, kw_only=True):
    """Either pair of names, of a text or a list of them each."""

    text_1: Raw = NULL
    text_2: Raw = NULL
    queries: Raw = NULL
    documents: Raw = NULL
    instruction: str | None = None


class RerankRequest(PoolingRequest, kw_only=True):
    query: str
    documents: Raw
    top_n: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None


NEUTRAL: Neutral = {
    "activation": (),
    "add_generation_prompt": (False,),
    "additional_data": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "data": (),
    "data_1": (),
    "data_2": (),
    "embed_dtype": ("float32",),
    "embedding_types": (["float"],),
    "endianness": ("native", "little"),
    "items": (),
    "late_chunking": (False,),
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "media_io_kwargs": ({},),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "padding": ("do_not_pad",),
    "rank_fields": (["text"],),
    "softmax": (),
}
"""As in ``unsupported.py``."""
