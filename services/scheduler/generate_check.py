"""Checks that a Generate can be computed: its numbers index tables here and in workers."""

import numpy as np

from shared.errors import InvalidRequest
from shared.wire.faults import ids_fault, params_fault, pooling_fault
from shared.wire.messages import Generate, NewSequence


def check_generate(
    generate: Generate,
    prompt: np.ndarray,
    emitted: np.ndarray,
    vocab_size: int,
    max_model_len: int,
    pooled_size: int,
) -> None:
    """Raises InvalidRequest for what no client of a gateway can ask. ``prompt`` and ``emitted`` are
    the buffers of ``generate``."""
    if not len(prompt):
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if len({each.request for each in generate.sequences}) < len(generate.sequences):
        raise InvalidRequest(f"two sequences of {generate.request} have the same name")
    num_emitted = sum(each.num_emitted for each in generate.sequences)
    if num_emitted != len(emitted):
        raise InvalidRequest(f"{num_emitted} ids were emitted before, and {len(emitted)} came")
    for ids in (prompt, emitted):
        if fault := ids_fault(ids, vocab_size):
            raise InvalidRequest(f"the prompt or what follows has {fault}", param="prompt")
    fault = params_fault(generate.params, vocab_size)
    if fault := fault or pooling_fault(generate.params, pooled_size):
        raise InvalidRequest(fault)
    max_tokens = generate.params.max_tokens
    end = max_model_len if max_tokens is None else len(prompt) + max_tokens
    for sequence in generate.sequences:
        _check_sequence(sequence, len(prompt), min(end, max_model_len))


def _check_sequence(sequence: NewSequence, prompt_len: int, end: int) -> None:
    if sequence.num_prompt_scored >= prompt_len:
        raise InvalidRequest(
            f"num_prompt_scored is {sequence.num_prompt_scored} of a prompt of {prompt_len} tokens,"
            " the first of which has no logprob"
        )
    if sequence.num_emitted and prompt_len + sequence.num_emitted >= end:
        raise InvalidRequest(
            f"{sequence.num_emitted} tokens were emitted after {prompt_len} of the prompt; the"
            f" sequence is full with {end}"
        )
