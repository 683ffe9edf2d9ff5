"""Sampling and logprobs by the native library.

The structure is that of ``sampler.cpp``, field by field; logprobs are in ``logprobs.cpp``.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.pointers import address, array_address
from kernels.logprobs.row_logprobs import RowLogprobs
from kernels.sample import Adjustments, RandomRows, adjust
from kernels.sample.slot_params import SlotParams

_Pointer = ctypes.c_void_p
_ARRAYS = ("rows", "positions", *SlotParams._fields)
_IN_CPP = ("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "seeds", "choices")
assert SlotParams._fields == _IN_CPP, "RandomRows of sampler.cpp has other fields"


class _RandomRows(ctypes.Structure):
    _fields_ = [("num", ctypes.c_int32), *((name, _Pointer) for name in _ARRAYS)]


class NativeSampler:
    """Samples rows of logits [S, V] float32, distributed over ``num_threads`` and independent of
    each other.

    The order of temperature, filters and sampling, and the kept tokens, equal ``kernels/sample``.
    Not thread-safe.
    """

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._hide_ids = library["shoal_hide"]
        self._sample = library["shoal_sample"]
        self._process = library["shoal_process"]
        self._logprobs = library["shoal_logprobs"]
        library["shoal_start"](num_threads)

    def sample(self, logits: Tensor, adjusted: Tensor, random: RandomRows | None) -> np.ndarray:
        """Token ids [S] int64 sampled from ``adjusted`` (possibly ``logits`` itself, or [S, W] over
        the first tokens only), or NOT_FINITE or NOTHING_LEFT."""
        logits, adjusted = logits.contiguous(), adjusted.contiguous()
        tokens = np.empty(len(logits), np.int64)
        shapes, rows = (*adjusted.shape, logits.shape[1]), ctypes.byref(random_struct(random))
        self._sample(address(logits), address(adjusted), *shapes, rows, array_address(tokens))
        return tokens

    def adjust(self, logits: Tensor, adjustments: Adjustments) -> Tensor:
        """A copy of the logits with the requests' rules applied; hidden ids are −inf."""
        return adjust(logits.contiguous(), adjustments, self._hide)

    def process(self, logits: Tensor, random: RandomRows | None) -> Tensor:
        """The scores [S, V] that ``sample`` draws from; filtered tokens are −inf."""
        logits = logits.contiguous()
        scores = torch.empty_like(logits)
        rows = ctypes.byref(random_struct(random))
        self._process(address(logits), *logits.shape, rows, address(scores))
        return scores

    def logprobs(
        self,
        logits: Tensor,
        tokens: Tensor,
        num_top: int | None,
        rows: np.ndarray | None = None,
        ids: np.ndarray | None = None,
    ) -> RowLogprobs:
        """Logprobs of ``tokens`` [S] int64, or only of ``rows`` [N] int64, and of the ``num_top``
        < V likeliest tokens (None: the whole vocabulary), or of ``ids`` [N, num_top] instead."""
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        rows = np.arange(num_rows) if rows is None else rows
        wanted, num = tokens.numpy()[rows], len(rows)
        width = vocab_size if num_top is None else num_top
        values = torch.empty(num, 1 + width)
        top_ids = torch.empty(num, num_top or 0, dtype=torch.int32)
        if ids is not None:
            top_ids.copy_(torch.from_numpy(ids))
        ranks = torch.empty(num, dtype=torch.int32)
        self._logprobs(
            *(address(logits), vocab_size, num, array_address(rows), array_address(wanted)),
            *(-1 if num_top is None else num_top, ids is None),
            *(address(values), address(top_ids), address(ranks)),
        )
        return RowLogprobs(values, top_ids, ranks)

    def _hide(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """See ``kernels/grammar_mask``."""
        shapes = logits.shape[1], len(rows), masks.shape[1]
        self._hide_ids(*map(address, (logits, rows, masks)), *shapes)


def random_struct(random: RandomRows | None) -> _RandomRows:
    if random is None:
        return _RandomRows()
    arrays = (random.rows, random.positions, *random.params)
    return _RandomRows(len(random.rows), *map(address, arrays))
