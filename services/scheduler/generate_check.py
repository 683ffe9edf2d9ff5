"""Whether a Generate can be computed: its numbers index tables here and in workers."""

import numpy as np

from shared.errors import InvalidRequest
from shared.faults import ids_fault, params_fault
from shared.messages import Generate


def check_generate(
    generate: Generate, ids: np.ndarray, vocab_size: int, max_model_len: int
) -> None:
    """``ids`` are its buffer. Raises InvalidRequest, for what no client of a gateway can ask."""
    prompt_len, max_tokens = generate.prompt_len, generate.params.max_tokens
    if not 0 < prompt_len <= len(ids):
        raise InvalidRequest(f"prompt_len is {prompt_len}, and {len(ids)} ids came")
    if generate.num_told >= prompt_len:
        raise InvalidRequest(
            f"num_told is {generate.num_told} of a prompt of {prompt_len} tokens, the first of"
            " which is never told"
        )
    if fault := ids_fault(ids, vocab_size):
        raise InvalidRequest(f"the sequence has {fault}", param="prompt")
    if fault := params_fault(generate.params, vocab_size):
        raise InvalidRequest(fault)
    num_emitted = len(ids) - prompt_len
    end = max_model_len if max_tokens is None else prompt_len + max_tokens
    if num_emitted and len(ids) >= min(end, max_model_len):
        raise InvalidRequest(
            f"{num_emitted} tokens were emitted after {prompt_len} of the prompt; the sequence is"
            f" full with {min(end, max_model_len)}"
        )
