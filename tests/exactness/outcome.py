"""Compares two outputs: the first difference of their bits, and its size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from tests.exactness.mesh import Output, Scores

Gap = Callable[[int, int], float]
"""Of a position and another token there: the distance of its score and the expected token's."""


@dataclass(frozen=True)
class Difference:
    """Two outputs differ in ``field`` from token ``token`` on.

    ``size`` is the largest difference of logprobs; inf: it is not a matter of rounding.
    """

    field: str
    token: int
    size: float

    def __str__(self) -> str:
        return f"the {self.field} differ from token {self.token} on, by {self.size:.2g}"


def difference(found: Output, wanted: Output, gap: Gap) -> Difference | None:
    """Of ids, text, finish reason and logprobs; None where all are the same bits.

    Tokens after different ones are not comparable.
    """
    num_common = _first_other(found.ids, wanted.ids)
    parts = [
        _of_ids(found, wanted, num_common, gap),
        _of_text(found, wanted),
        _of_scores("output", found.scores, wanted.scores, num_common),
        _of_scores("prompt", found.prompt_scores, wanted.prompt_scores),
    ]
    differences = [each for each in parts if each is not None]
    if not differences:
        return None
    return replace(differences[0], size=max(each.size for each in differences))


def _first_other(found: Sequence[object], wanted: Sequence[object]) -> int:
    pairs = zip_longest(found, wanted)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(found))


def _of_ids(found: Output, wanted: Output, num_common: int, gap: Gap) -> Difference | None:
    if found.ids == wanted.ids:
        return None
    is_short = num_common == min(len(found.ids), len(wanted.ids))
    size = np.inf if is_short else gap(num_common, found.ids[num_common])
    return Difference("ids", num_common, size)


def _of_text(found: Output, wanted: Output) -> Difference | None:
    if found.ids != wanted.ids or (found.text, found.finish) == (wanted.text, wanted.finish):
        return None
    return Difference("text or finish reason", len(found.ids), np.inf)


def _of_scores(
    name: str, found: Scores, wanted: Scores, num_tokens: int | None = None
) -> Difference | None:
    """Equally likely tokens may have swapped places: the logprobs of the likeliest are in order."""
    pairs = [
        (own[:num_tokens], other[:num_tokens])
        for own, other in zip(found.arrays, wanted.arrays, strict=True)
    ]
    if all(own.tobytes() == other.tobytes() for own, other in pairs):
        return None
    token = min(_first_other(own.tolist(), other.tolist()) for own, other in pairs)
    are_alike = all(own.shape == other.shape for own, other in pairs)
    values, others = pairs[0]
    size = float(abs(values - others).max()) if are_alike else np.inf
    return Difference(f"logprobs of the {name}", token, size)
