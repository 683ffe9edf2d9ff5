"""The device's copy of the logits rules: an element for each of N slots, or a row over V tokens."""

from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Flags and counts summed in ``seen``.
IN_PROMPT, IS_END, EMITTED = 1, 2, 4


class SlotRules(NamedTuple, Generic[T]):
    """Tensors over all slots, or the values of one slot. The other rows of a slot with
    ``is_changed`` 0 are undefined."""

    is_changed: T  # [N] int32, 1 or 0
    # [N, V] int32: IN_PROMPT; IS_END of ids that end the output; EMITTED once per occurrence
    seen: T
    biases: T  # [N, V] float32; −inf hides
    min_ends: T  # [N] int32: earlier positions may not be an end
    repetition_penalty: T  # [N] float32
    presence_penalty: T  # [N] float64
    frequency_penalty: T  # [N] float64


class Changed(NamedTuple):
    """The changed logits of slots with rules; rows of other slots are ignored."""

    logits: Tensor  # [S, V] float32
    is_changed: Tensor  # [N] int32, 1 or 0, by slot


def no_rules(num: int, vocab_size: int, device: torch.device) -> SlotRules[Tensor]:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return SlotRules(
        is_changed=zeros(num),
        seen=zeros(num, vocab_size),
        biases=zeros(num, vocab_size, dtype=torch.float32),
        min_ends=zeros(num),
        repetition_penalty=zeros(num, dtype=torch.float32).fill_(1),
        presence_penalty=zeros(num, dtype=torch.float64),
        frequency_penalty=zeros(num, dtype=torch.float64),
    )
