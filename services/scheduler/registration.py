"""Decides which peers may connect: their model and capacity must be possible, and match those of
the others. Pure."""

from collections.abc import Iterable

from shared.wire.messages import (
    MAX_BATCHED_TOKENS,
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_MODEL_LEN,
    MAX_POOLED_SIZE,
    MAX_SEQS,
    MAX_SPECULATIVE_TOKENS,
    MAX_STALL_S,
    MAX_VOCAB_SIZE,
    Capacity,
    Hello,
    ModelInfo,
)
from shared.wire.same_model import difference

BOUNDS: dict[str, tuple[float, float]] = {
    "num_blocks": (1, MAX_BLOCKS),
    "block_size": (1, MAX_BLOCK_SIZE),
    "max_num_seqs": (1, MAX_SEQS),
    "max_num_batched_tokens": (1, MAX_BATCHED_TOKENS),
    "num_speculative_tokens": (0, MAX_SPECULATIVE_TOKENS),
    "stall_s": (0.001, MAX_STALL_S),
    "max_model_len": (1, MAX_MODEL_LEN),
    "vocab_size": (1, MAX_VOCAB_SIZE),
    "pooled_size": (0, MAX_POOLED_SIZE),
}
SHARED_FIELDS = ("max_model_len", "vocab_size")


def why_refused(hello: Hello, others: Iterable[Hello]) -> str | None:
    """Returns why the tokenizer or worker that sent ``hello`` may not join ``others``, or None."""
    if hello.model is None:
        return "Hello lacks the model"
    if hello.service == "worker":
        problem = _problem_of(hello.capacity, hello.model)
    else:
        problem = _out_of_bounds(hello.model)
    return problem or next(filter(None, (difference(hello, other) for other in others)), None)


def _problem_of(capacity: Capacity | None, model: ModelInfo) -> str | None:
    if capacity is None:
        return "Hello lacks the capacity"
    for field in SHARED_FIELDS:
        value, expected = getattr(capacity, field), getattr(model, field)
        if value != expected:
            return f"{field} of the capacity is {value}, but {expected} of the model"
    pooled_size = model.pooling.size if model.pooling is not None else 0
    if capacity.pooled_size != pooled_size:
        return (
            f"pooled_size of the capacity is {capacity.pooled_size}, but {pooled_size} of the model"
        )
    return _out_of_bounds(capacity)


def _out_of_bounds(sizes: Capacity | ModelInfo) -> str | None:
    for field, (least, most) in BOUNDS.items():
        value = getattr(sizes, field, least)
        if not least <= value <= most:
            return f"{field} is {value}, which is not between {least} and {most}"
    return None
