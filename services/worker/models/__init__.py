"""Models, one file a family, and what the engines need of them."""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from kernels.cpu.decode import NativeDecoder
from services.worker.layers.offloaded import OffloadedLayers


class DraftLogits(NamedTuple):
    """Of N drafts. The head may have ``computed`` those of some tokens alone [N, W] float32; they
    are spread over the vocabulary in ``of_all`` [N, vocab_size], −inf for other tokens."""

    computed: Tensor
    of_all: Tensor


class DraftHead(Protocol):
    """An MTP head as a backend computes it, on T pairs of a state and the token after it.

    Its layer of the KV cache is behind those of the trunk.
    """

    def first_state(self, hidden: Tensor) -> Tensor:
        """The trunk's hidden states [T, hidden] → the states of the first pairs."""

    def forward(self, state: Tensor, input_ids: Tensor, positions: Tensor) -> Tensor:
        """state [T, hidden] of tokens at ``positions`` [T], input_ids [T] of those behind them →
        [T, hidden], which are the states of the pairs for the drafts after these."""

    def logits(self, out: Tensor) -> DraftLogits:
        """Takes [N, hidden], some of what ``forward`` gave."""


class CausalLM(nn.Module, ABC):
    """A model as a backend computes it. Attention finds its context in ``layers/context.py``.

    T tokens of a step are flattened over its rows.
    """

    clears_blocks = True  # blocks of the KV cache must be zeroed before a sequence gets them
    draft_head: DraftHead | None = None
    offloaded: OffloadedLayers | None = None  # whose weights a pass brings to the device

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[T], [T] → hidden states [T, hidden]."""

    def decoder(self, eos_ids: np.ndarray) -> NativeDecoder | None:
        """Returns what computes several steps at once, of rows that end with one of ``eos_ids`` [E]
        int64, where there is such a thing."""
        return None

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden], the states of some of the tokens → [S, vocab_size] float32; of a model that
        pools those states after the last norm, [S, hidden] float32."""


class TorchCausalLM(CausalLM):
    """A model that torch's operators compute, or kernels that are launched as these are: on GPUs
    too."""

    hidden_size: int
    vocab_size: int

    @abstractmethod
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """In ``out`` [S, vocab_size] float32, if there is one."""
