"""Refuses requests that no worker could ever run, and names the limit."""

from collections.abc import Iterable

from shared.errors import InvalidRequest
from shared.wire.kv_groups import most_blocks
from shared.wire.messages import Capacity


class LacksBlocks(InvalidRequest):
    """A worker with more KV blocks could run the request."""


def check_length(capacities: Iterable[Capacity], prompt_len: int, max_tokens: int | None) -> None:
    """Raises InvalidRequest if no worker could run the request to its end, even alone.

    ``max_tokens`` None asks for the rest of the context.
    """
    roomiest_first = sorted(capacities, key=_max_tokens_of, reverse=True)
    if not any(fits(capacity, prompt_len, max_tokens) for capacity in roomiest_first):
        _check(roomiest_first[0], prompt_len, max_tokens)


def fits(capacity: Capacity, prompt_len: int, max_tokens: int | None) -> bool:
    """True if a worker of this capacity can run the request to its end."""
    try:
        _check(capacity, prompt_len, max_tokens)
    except InvalidRequest:
        return False
    return True


def _max_tokens_of(capacity: Capacity) -> int:
    num_tokens = capacity.num_blocks * capacity.block_size // len(capacity.groups)
    return min(num_tokens, capacity.max_model_len)


def _check(capacity: Capacity, prompt_len: int, max_tokens: int | None) -> None:
    limit = capacity.max_model_len
    _check_context(limit, prompt_len, max_tokens)
    _check_blocks(capacity, limit if max_tokens is None else prompt_len + max_tokens)


def _check_context(limit: int, prompt_len: int, max_tokens: int | None) -> None:
    if prompt_len + (1 if max_tokens is None else max_tokens) <= limit:
        return
    is_prompt_alone = prompt_len >= limit
    output = f", max_tokens is {max_tokens}"
    if is_prompt_alone:
        output = ", that leaves no room for output" if max_tokens != 0 else ""
    raise InvalidRequest(
        f"the context holds {limit} tokens (max-model-len): the prompt has {prompt_len}{output}",
        param="prompt" if is_prompt_alone else "max_tokens",
        code="context_length_exceeded",
    )


def _check_blocks(capacity: Capacity, num_tokens: int) -> None:
    num_blocks = most_blocks(capacity, num_tokens)
    if num_blocks <= capacity.num_blocks:
        return
    raise LacksBlocks(
        f"{num_tokens} tokens of prompt and output need {num_blocks} KV blocks of"
        f" {capacity.block_size} tokens, but a worker has {capacity.num_blocks}: ask for fewer"
        " max_tokens, or give the worker more (gpu-memory-utilization, num-gpu-blocks-override)",
        param="max_tokens",
        code="context_length_exceeded",
    )
