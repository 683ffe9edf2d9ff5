"""Checks that the model fits an endpoint: it writes texts, or it pools."""

from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo, PoolingInfo

NOT_GENERATING, NOT_POOLING = "model_does_not_generate", "model_does_not_pool"


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


def pooling_of(model: ModelInfo) -> PoolingInfo:
    """The model's pooling. Raises InvalidRequest for a model that writes texts."""
    if model.pooling is None:
        raise InvalidRequest(
            f"the model {model.names[0]} writes texts (runner = generate); with --runner pooling"
            " it gives embeddings, with classifier_from_token in --pooler-config scores",
            param="model",
            code=NOT_POOLING,
        )
    return model.pooling
