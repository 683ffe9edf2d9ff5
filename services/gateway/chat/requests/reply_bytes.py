"""Estimates the bytes of a job's reply held by the gateway before its client reads them."""

from collections.abc import Sequence

from services.gateway.mesh.job import Job
from shared.wire.codec import Array
from shared.wire.messages import ALL_TOKENS, WINDOW_BYTES, WINDOW_TOKENS, ModelInfo

TOKEN_BYTES = 16  # kept around the text of a token, when many are merged
ID_BYTES = 48  # of a token id in a reply: int32, then a number of Python's in a list, then text
ENTRY_BYTES = 100  # of a logprob that is kept as JSON, with the text of its token
DRAFT_BYTES = 20  # id, logprob, rank, position, whether it was right
NUM_DRAFTS = 8  # reckoned for a token; how many come is a matter of the worker


def token_bytes(job: Job, model: ModelInfo) -> int:
    """The bytes held in addition to the text, for all choices: an id, a float32 and a rank for each
    token and alternative, drafts, and ids for the client. A whole reply holds all its tokens; a
    streamed one holds the tokens sent before its client reads, and the tokens that wait for the
    rest of their chunk."""
    logprobs = job.params.logprobs
    if logprobs is None and not job.returns_ids:
        return 0
    per_token = ID_BYTES * job.returns_ids + NUM_DRAFTS * DRAFT_BYTES * job.params.draft_logprobs
    if logprobs is not None:
        per_token += _logprob_bytes(logprobs, model)
        per_token += ENTRY_BYTES * (1 + logprobs) * job.keeps_logprobs
    max_tokens = job.params.max_tokens
    num_tokens = model.max_model_len if max_tokens is None else min(max_tokens, model.max_model_len)
    if job.is_stream and not job.keeps_logprobs:
        window = min(min(num_tokens, WINDOW_TOKENS) * per_token, WINDOW_BYTES + per_token)
        max_bytes = window + min(num_tokens, job.stream_interval - 1) * per_token
    else:
        max_bytes = num_tokens * per_token
    return job.total_choices * max_bytes


def prompt_bytes(job: Job, model: ModelInfo, prompt_ids: Sequence[Array]) -> int:
    """The bytes held for the prompts, shared by their choices; as in ``token_bytes``."""
    if job.params.prompt_logprobs is None:
        return 0
    per_token = _logprob_bytes(job.params.prompt_logprobs, model)
    nums_bytes = [len(ids) * per_token for ids in prompt_ids]
    if job.is_stream:
        return sum(min(num_bytes, WINDOW_BYTES + per_token) for num_bytes in nums_bytes)
    return sum(nums_bytes)


def _logprob_bytes(num_logprobs: int, model: ModelInfo) -> int:
    num_alternatives = model.vocab_size if num_logprobs == ALL_TOKENS else num_logprobs
    return 8 * (2 + num_alternatives)
