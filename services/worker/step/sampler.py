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
    waiting: np.ndarray  # [W] int64: rows without a sample, their grammar is being compiled


class Sampler(Protocol):
    """Logits are [S, V] float32."""

    def sample(self, logits: Tensor, adjusted: Tensor, random: RandomRows | None) -> np.ndarray:
        """Samples token ids [S] int64 from ``adjusted``, which may be ``logits`` itself; ``logits``
        may cover only the first tokens [S, W].

        A row has NOT_FINITE in place of a token if its ``logits`` have a NaN or an infinity, or
        NOTHING_LEFT if all of its ``adjusted`` is −inf.
        """

    def adjust(self, logits: Tensor, adjustments: Adjustments) -> Tensor:
        """Returns a copy with the requests' changes; hidden tokens are −inf."""

    def process(self, logits: Tensor, random: RandomRows | None) -> Tensor:
        """Returns the scores [S, V] that ``sample`` draws from; filtered tokens are −inf."""

    def logprobs(
        self,
        logits: Tensor,
        tokens: Tensor,
        num_top: int | None,
        rows: np.ndarray | None = None,
        ids: np.ndarray | None = None,
    ) -> RowLogprobs:
        """Returns the logprobs of ``tokens`` [S] int64, only for ``rows`` [N] int64, ascending, if
        given; and of the ``num_top`` < V likeliest tokens (None: the whole vocabulary), or of
        ``ids`` [N, num_top] int64 instead. The logprob of a token below 0 is undefined."""


class TorchSampler:
    """Samples with torch's operators, on every device."""

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
