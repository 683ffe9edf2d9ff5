"""Turns a step's logits into tokens, scores and logprobs."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.logprobs import logprobs
from kernels.logprobs.row_logprobs import RowLogprobs
from kernels.sample import Adjustments, RandomRows, adjust, checked, process, sample


class Sampler(Protocol):
    """Logits are [S, V] float32."""

    def sample(self, logits: Tensor, adjusted: Tensor, random: RandomRows | None) -> np.ndarray:
        """Samples token ids [S] int64 from ``adjusted``, which may be ``logits`` themselves; those
        may be of some tokens only [S, W].

        In place of a token NOT_FINITE where the row of ``logits`` has a NaN or an infinity, or
        NOTHING_LEFT where all of ``adjusted`` is −inf.
        """
        ...

    def adjust(self, logits: Tensor, adjustments: Adjustments) -> Tensor:
        """Returns a copy with what requests ask to be changed; what is hidden is −inf."""
        ...

    def process(self, logits: Tensor, random: RandomRows | None) -> Tensor:
        """Returns the scores that are sampled from, [S, V]; what is filtered is −inf."""
        ...

    def logprobs(
        self,
        logits: Tensor,
        rows: np.ndarray,
        tokens: np.ndarray,
        num_top: int | None,
        ids: np.ndarray | None = None,
    ) -> RowLogprobs:
        """Returns the logprobs of ``rows`` [N] int64, ascending, and their ``tokens`` [N] int64;
        ``num_top`` < V, or None: the whole vocabulary; or of ``ids`` [N, num_top] int64 instead of
        the likeliest."""
        ...


class TorchSampler:
    """Samples by torch's operators, on every device."""

    def sample(self, logits: Tensor, adjusted: Tensor, random: RandomRows | None) -> np.ndarray:
        """Copies to the host once."""
        return checked(sample(adjusted, random), logits, adjusted).cpu().numpy()

    def adjust(self, logits: Tensor, adjustments: Adjustments) -> Tensor:
        return adjust(logits, adjustments)

    def process(self, logits: Tensor, random: RandomRows | None) -> Tensor:
        return process(logits, random)

    def logprobs(
        self,
        logits: Tensor,
        rows: np.ndarray,
        tokens: np.ndarray,
        num_top: int | None,
        ids: np.ndarray | None = None,
    ) -> RowLogprobs:
        device = logits.device
        if len(rows) < len(logits):
            logits = logits[torch.from_numpy(rows).to(device)]
        asked = None if ids is None else torch.from_numpy(ids).to(device)
        return logprobs(logits, torch.from_numpy(tokens).to(device), num_top, asked)
