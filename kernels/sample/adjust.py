"""A request's changes to its logits before temperature and filters.

The order is: the mask of a grammar → allowed ids → hidden ids (bad words, ends before min_tokens) →
bias → penalties.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.grammar_mask import HIDDEN, hide

Hide = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class RowChange:
    """The changes to row ``row`` of the logits. Ids are distinct, except in ``hidden``.

    ``known`` are the distinct ids of prompt and output, ``emitted`` those of the output, with their
    counts; both are given only if penalties need them.
    """

    row: int
    allowed: np.ndarray  # [n] int64; empty: all
    hidden: np.ndarray  # [n] int64
    biased: np.ndarray  # [n] int64
    biases: np.ndarray  # [n] float32
    known: np.ndarray  # [n] int64
    repetition_penalty: float
    emitted: np.ndarray  # [n] int64
    num_emitted: np.ndarray  # [n] int64
    presence_penalty: float
    frequency_penalty: float


@dataclass(frozen=True, slots=True)
class Points:
    """Single elements of the logits, each with an operand."""

    rows: Tensor  # [n] int64
    ids: Tensor  # [n] int64
    values: Tensor  # [n] float32


class Masks(NamedTuple):
    rows: Tensor  # [M] int64
    bits: Tensor  # [M, ⌈V / 32⌉] int32


@dataclass(frozen=True, slots=True)
class Adjustments:
    """The changes of all rows by kind; a kind no row has is None."""

    masks: Masks | None
    allowed: Points | None = None
    hidden: Points | None = None
    biases: Points | None = None
    repetition: Points | None = None
    penalties: Points | None = None


def prepare_adjustments(
    changes: Sequence[RowChange],
    masks: Mapping[int, np.ndarray],
    upload: Callable[[np.ndarray], Tensor],
) -> Adjustments | None:
    """``masks`` [⌈V / 32⌉] int32 hold, by row, the bits of the ids a grammar allows, see
    ``grammar_mask``. ``upload`` copies an array to the device of the logits."""
    uploaded = None
    if masks:
        uploaded = Masks(upload(np.array([*masks])), upload(np.stack([*masks.values()])))
    if not changes:
        return uploaded and Adjustments(uploaded)

    def points(ids: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> Points | None:
        rows = np.repeat([change.row for change in changes], [len(each) for each in ids])
        if not len(rows):
            return None
        return Points(
            upload(rows),
            upload(np.concatenate(ids)),
            upload(np.concatenate(values).astype(np.float32)),
        )

    def constant(ids: Sequence[np.ndarray], values: Sequence[float]) -> Points | None:
        pairs = zip(ids, values, strict=True)
        return points(ids, [np.full(len(each), value, np.float32) for each, value in pairs])

    zeros = [0.0] * len(changes)
    return Adjustments(
        uploaded,
        constant([each.allowed for each in changes], zeros),
        constant([each.hidden for each in changes], zeros),
        points([each.biased for each in changes], [each.biases for each in changes]),
        constant([each.known for each in changes], [each.repetition_penalty for each in changes]),
        points(
            [each.emitted for each in changes],
            [each.presence_penalty + each.frequency_penalty * each.num_emitted for each in changes],
        ),
    )


def adjust(logits: Tensor, adjustments: Adjustments, hide: Hide = hide) -> Tensor:
    """logits [S, V] float32 → a changed copy; hidden ids are −inf. ``hide`` is an implementation of
    ``grammar_mask.hide``.

    Repetition divides positive logits and multiplies negative ones (arXiv 1909.05858); presence and
    frequency are subtracted, as in OpenAI's API.
    """
    logits = logits.clone()
    if adjustments.masks is not None:
        hide(logits, adjustments.masks.rows, adjustments.masks.bits)
    if (allowed := adjustments.allowed) is not None:
        kept = logits[allowed.rows, allowed.ids]
        is_restricted = torch.zeros_like(logits[:, :1], dtype=torch.bool)
        is_restricted[allowed.rows] = True
        logits.masked_fill_(is_restricted, HIDDEN)
        logits[allowed.rows, allowed.ids] = kept
    if (hidden := adjustments.hidden) is not None:
        logits[hidden.rows, hidden.ids] = HIDDEN
    if (biases := adjustments.biases) is not None:
        logits[biases.rows, biases.ids] += biases.values
    if (repetition := adjustments.repetition) is not None:
        seen = logits[repetition.rows, repetition.ids]
        factor = torch.where(seen > 0, 1 / repetition.values, repetition.values)
        logits[repetition.rows, repetition.ids] = seen * factor
    if (penalties := adjustments.penalties) is not None:
        logits[penalties.rows, penalties.ids] -= penalties.values
    return logits
