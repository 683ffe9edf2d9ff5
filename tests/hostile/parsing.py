"""From bodies of every endpoint to the mesh's input, without a server."""

from typing import Any

import msgspec

from services.gateway.apis.messages.requests.parse import parse_messages, parse_prompt
from services.gateway.apis.pooling.parse import parse_embeddings
from services.gateway.apis.pooling.scoring import parse_rerank, parse_score
from services.gateway.apis.responses.requests.parse import read_request, response_job
from services.gateway.apis.tokenization.requests import parse_detokenize, parse_tokenize
from services.gateway.chat.requests.parse import parse_chat, parse_completion
from services.gateway.mesh.job import Prompt
from shared.wire.messages import ModelInfo, PoolingInfo
from tests.hostile import shapes
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.text.asking import STRUCTURED

WRITER = msgspec.structs.replace(MODEL, tool_parser="hermes", max_model_len=1 << 20)
POOLER = msgspec.structs.replace(
    MODEL, runner="pooling", pooling=PoolingInfo("classify", "last", "none", 1)
)


def parse(path: str, body: bytes) -> Any:
    """Raises InvalidRequest."""
    match path:
        case shapes.CHAT:
            return parse_chat(body, WRITER, STRUCTURED)
        case shapes.TEXT:
            return parse_completion(body, WRITER, STRUCTURED)
        case shapes.RESPONSES | shapes.COUNT_ITEMS:
            return _response(body, WRITER)
        case shapes.MESSAGES:
            return parse_messages(body, WRITER, STRUCTURED)
        case shapes.COUNT_TURNS:
            return parse_prompt(body, WRITER, STRUCTURED.media)
        case shapes.TOKENIZE:
            return parse_tokenize(body, WRITER)
        case shapes.DETOKENIZE:
            return parse_detokenize(body, WRITER)
        case shapes.EMBEDDINGS:
            embedding = PoolingInfo("embed", "last", "none", 8)
            return parse_embeddings(
                body, msgspec.structs.replace(POOLER, pooling=embedding), STRUCTURED
            )
        case shapes.SCORE:
            return parse_score(body, POOLER, STRUCTURED)
        case shapes.RERANK:
            return parse_rerank(body, POOLER, STRUCTURED)
    raise ValueError(path)


def prompts_of(asked: Any) -> list[Prompt]:
    """The prompts in any result of ``parse``."""
    asked = getattr(asked, "job", asked)
    return [asked.prompt] if hasattr(asked, "prompt") else getattr(asked, "prompts", [])


def _response(body: bytes, model: ModelInfo) -> Any:
    request = read_request(body)
    return response_job(request, request.items, lambda text: None, model, STRUCTURED)
