"""What a step brought, as the message for one tokenizer."""

import numpy as np

from services.scheduler.sequence import Emission
from shared.messages import Finished, TokenRow, Tokens


def tokens_of(emissions: list[Emission], ids: np.ndarray) -> tuple[Tokens, np.ndarray]:
    """The message for the peer of ``emissions`` and its buffer, a view where they lie together."""
    rows = [
        TokenRow(*emission.sequence.key, emission.position, emission.num_tokens)
        for emission in emissions
    ]
    finished = [
        Finished(
            *emission.sequence.key,
            emission.finish,
            len(emission.sequence.prompt),
            emission.position + emission.num_tokens,
        )
        for emission in emissions
        if emission.finish is not None
    ]
    return Tokens(rows, finished), _ids_of(emissions, ids)


def _ids_of(emissions: list[Emission], ids: np.ndarray) -> np.ndarray:
    first, last = emissions[0], emissions[-1]
    end = last.start + last.num_tokens
    if end - first.start == sum(emission.num_tokens for emission in emissions):
        return ids[first.start : end]
    parts = [ids[each.start : each.start + each.num_tokens] for each in emissions]
    return np.concatenate(parts)
