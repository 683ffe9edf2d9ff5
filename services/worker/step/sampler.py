"""Turns a step's logits into tokens, scores and logprobs."""

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from kernels.logprobs import logprobs
from kernels.logprobs.row_logprobs import RowLogprobs
from kernels.sample import Adjustments, RandomRows, adjust, checked, process, sample
from services.worker.machine.streams import upload


class Adjusted(NamedTuple):
    """Logits with the changes of logits rules."""

    logits: Tensor  # [S, V]
    waiting: np.ndarray  # [W] int64: rows from which nothing is sampled: grammars are compiled


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
        tokens: Tensor,
        num_top: int | None,
        rows: np.ndarray | None = None,
        ids: np.ndarray | None = None,
    ) -> RowLogprobs:
        """Returns the logprobs of ``tokens`` [S] int64, of ``rows`` [N] int64, ascending, alone if
        given. ``num_top`` < V, or None: the whole vocabulary; or of ``ids`` [N, num_top] int64
        instead of the likeliest. The own logprob of a token below 0 may be anything."""
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
        tokens: Tensor,
        num_top: int | None,
        rows: np.ndarray | None = None,
        ids: np.ndarray | None = None,
    ) -> RowLogprobs:
        device = logits.device
        if rows is not None and len(rows) < len(logits):
            where = upload(rows, device)
            logits, tokens = logits[where], tokens[where]
        asked = None if ids is None else upload(ids, device)
        return logprobs(logits, tokens.clamp(min=0), num_top, asked)
