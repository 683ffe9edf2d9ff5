"""The limit of a chat's prompt; above it the oldest turns are dropped."""

from services.gateway.chat.requests.schema import ChatRequest, TokenizeRequest
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo

NO_LIMIT, ALL_THAT_FIT = 0, -1
TEXT_SHARE = 4  # this part of the context is left to texts without max_tokens


def history_limit(asked: int, max_tokens: int | None, model: ModelInfo) -> int:
    """``asked`` tokens, reduced to leave room for a text of ``max_tokens``; 0: no limit, also if
    there is no room for any prompt."""
    context = model.max_model_len
    if asked == ALL_THAT_FIT:
        return max(context - (max_tokens or context // TEXT_SHARE), 0)
    return min(asked, max(context - (max_tokens or 1), 0))


def requested_limit(
    request: ChatRequest | TokenizeRequest, default: int, max_tokens: int | None, model: ModelInfo
) -> int:
    """``default`` applies to requests without a choice. Raises InvalidRequest for a request to cut
    tokens and drop turns at once."""
    if request.truncate_prompt_tokens is None:
        asked = default if request.history_limit is None else request.history_limit
        return history_limit(asked, max_tokens, model)
    if request.history_limit:
        raise InvalidRequest(
            "history_limit is allowed without truncate_prompt_tokens only",
            param="history_limit",
        )
    return NO_LIMIT
