"""Validates ids, logprobs and SamplingParams from a peer."""

from itertools import chain

from shared.wire.codec import Array
from shared.wire.messages import Guide, SamplingParams

MAX_LIST_BYTES = 1 << 20
"""Per request, in a plan's header of at most 4 MiB."""
MAX_LOGPROB = 1e30
MAX_BAD_SEQUENCES = 1024
MAX_BAD_WORD_IDS = 4096


def list_bytes(params: SamplingParams) -> int:
    """Approximate msgpack bytes of the lists and the grammar of ``params``."""
    ids = len(params.stop_token_ids) + len(params.allowed_token_ids)
    ids += len(params.logprob_token_ids)
    ids += sum(1 + len(word) for word in params.bad_words)
    num_bytes = 5 * ids + 15 * len(params.logit_bias)
    if (guide := params.guide) is not None:
        num_bytes += len(guide.grammar.encode()) + 5 * sum(map(len, _guide_ids(guide).values()))
    return num_bytes


def _guide_ids(guide: Guide) -> dict[str, list[int]]:
    return {
        "guide.open_ids": guide.open_ids,
        "guide.close_ids": guide.close_ids,
        "guide.forced_ids": guide.forced_ids,
    }


def params_fault(params: SamplingParams, vocab_size: int) -> str | None:
    """The reason against sampling with ``params``, or None."""
    if (num_bytes := list_bytes(params)) > MAX_LIST_BYTES:
        return (
            f"the lists and the grammar of its parameters take {num_bytes} bytes; the limit is"
            f" {MAX_LIST_BYTES}"
        )
    if params.pooling is not None and params.max_tokens != 0:
        return f"max_tokens is {params.max_tokens} of a prompt that is pooled; expected 0"
    lengths = [len(word) for word in params.bad_words]
    are_words = all(0 < each <= MAX_BAD_WORD_IDS for each in lengths)
    if len(lengths) > MAX_BAD_SEQUENCES or not are_words:
        return (
            f"bad_words has {len(lengths)} words of {min(lengths)} to {max(lengths)} ids; expected"
            f" up to {MAX_BAD_SEQUENCES} of 1 to {MAX_BAD_WORD_IDS}"
        )
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
        ("bad_words", list(chain.from_iterable(params.bad_words))),
        *(_guide_ids(params.guide).items() if params.guide is not None else ()),
    ):
        if ids and max(ids) >= vocab_size:
            return f"{name} has the id {max(ids)}; the model has {vocab_size}"
    return None


def reads_all(params: SamplingParams) -> bool:
    """True if the states of all prompt tokens are pooled, so that none may come from the cache."""
    return params.pooling is not None and params.pooling.pooling_type != "last"


def pooling_fault(params: SamplingParams, pooled_size: int) -> str | None:
    """The reason against the request for a model with ``pooled_size`` values per prompt (0: it
    generates text), or None."""
    if params.pooling is None:
        return "the model pools, and writes no texts (runner)" if pooled_size else None
    if not pooled_size:
        return "the model writes texts, and does not pool (runner)"
    if params.pooling.num_dims > pooled_size:
        return f"{params.pooling.num_dims} numbers of an embedding that has {pooled_size}"
    return None


def ids_fault(ids: Array, vocab_size: int) -> str | None:
    """An error if ``ids`` [n] int32 are not all in the vocabulary, or None."""
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        return f"ids from {ids.min()} to {ids.max()}; the model has {vocab_size}"
    return None


def logprobs_fault(values: Array) -> str | None:
    """An error if ``values`` [n] float32 are not valid logprobs, or None. NaN is invalid."""
    if len(values) and not -MAX_LOGPROB < values.min() <= values.max() < MAX_LOGPROB:
        return f"logprobs from {values.min()} to {values.max()}"
    return None
