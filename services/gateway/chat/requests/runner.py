"""Checks that the model fits an endpoint: it writes texts."""

from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo

NOT_GENERATING = "model_does_not_generate"


def check_generates(model: ModelInfo) -> None:
    """Raises InvalidRequest for a model that pools."""
    if model.pooling is None:
        return
    routes = "/v1/embeddings, /pooling, /score and /rerank"
    if model.pooling.task == "classify":
        routes = "/classify, /pooling, /score and /rerank"
    raise InvalidRequest(
        f"the model {model.names[0]} pools (runner): it writes no texts, and answers {routes}",
        param="model",
        code=NOT_GENERATING,
    )
