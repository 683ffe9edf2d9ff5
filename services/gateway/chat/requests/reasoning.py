"""Whether a model shall reason, for how long, and whether its client sees it."""

from typing import Any

from services.gateway.chat.requests.schema import ChatRequest, GenerationRequest
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo

SWITCHES = ("enable_thinking", "thinking")
"""Names in chat templates of the variable that turns reasoning on or off."""


def reasoning_kwargs(request: ChatRequest) -> dict[str, Any]:
    """The variables that tell a chat template how much to reason."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | dict.fromkeys(SWITCHES, effort != "none")


def reasoning_budget(request: GenerationRequest, model: ModelInfo) -> tuple[int | None, str]:
    """The most tokens of reasoning, and the field that says so. Raises InvalidRequest."""
    custom = request.custom_params
    given = {
        "thinking_token_budget": request.thinking_token_budget,
        "reasoning_max_tokens": request.reasoning_max_tokens,
        "custom_params.thinking_budget": custom.thinking_budget if custom is not None else None,
    }
    budgets = [(param, budget) for param, budget in given.items() if budget not in (None, -1)]
    if not budgets:
        return None, ""
    (param, budget), *others = budgets
    if others:
        raise InvalidRequest(f"{param} and {others[0][0]} are both given", param=param)
    if not model.reasoning_parser:
        raise InvalidRequest(
            f"{param} is {budget}; this model has no reasoning-parser", param=param
        )
    if budget and isinstance(request, ChatRequest) and request.reasoning_effort == "none":
        raise InvalidRequest(f'{param} is {budget}, and reasoning_effort is "none"', param=param)
    return budget, param
