"""Models, one file a family, and their interface to the engines."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from kernels.cpu.decode import NativeDecoder
from services.worker.layers.offloaded import Offloaded

MakeDrafter = Callable[..., Any]  # a Drafter, with the arguments of MtpDrafter


def parts_of(given: Tensor, more_sizes: tuple[int, ...]) -> list[Tensor]:
    """The inputs of a pass: ids [T], states [T, hidden], or rows [n, T, size] in parts."""
    if given.ndim < 3:
        return [given]
    sizes = [given.shape[2] - sum(more_sizes), *more_sizes]
    return [part.contiguous() for rows in given for part in rows.split(sizes, 1)]


class DraftLogits(NamedTuple):
    """The logits of N drafts. The head may have ``computed`` only the logits of some tokens
    [N, W] float32; ``of_all`` [N, vocab_size] spreads them over the vocabulary, −inf for others."""

    computed: Tensor
    of_all: Tensor


class DraftHead(Protocol):
    """An MTP head as a backend computes it, on T pairs of a state and the next token. Its layer of
    the KV cache comes after the trunk's layers. ``make_drafter``: see ``MtpHead``."""

    make_drafter: MakeDrafter | None

    def first_state(self, hidden: Tensor) -> Tensor:
        """The trunk's output [T, size] → the states [T, hidden] of the first pairs."""

    def forward(self, state: Tensor, input_ids: Tensor, positions: Tensor) -> Tensor:
        """state [T, hidden] of tokens at ``positions`` [T], input_ids [T] of the next tokens →
        [T, hidden], the states of the pairs for the next drafts."""

    def logits(self, out: Tensor) -> DraftLogits:
        """Takes [N, hidden], some rows of ``forward``'s output."""


class CausalLM(nn.Module, ABC):
    """A model as a backend computes it, with the T tokens of a step's rows one after another.
    Attention finds its context in ``layers/context.py``."""

    clears_blocks = True  # blocks of the KV cache must be zeroed before a sequence gets them
    draft_head: DraftHead | None = None
    offloaded: Offloaded | None = None  # a pass copies their weights to the device
    make_pooler: Any = None  # PoolingInfo → Pooler, of a model that pools by itself
    pack: Any = None  # NativeLibrary → None, of a model that runs native code; NotSupported if not
    # Is told the slots [S] of rows of logits.
    place_logits: Callable[[np.ndarray], None] = staticmethod(lambda slots: None)

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[T], [T] → hidden states [T, hidden], and after them the inputs of tapped layers. The
        ``num_embeddings`` [n, T, hidden] of a model may be given in place of ids, and are used
        up."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] → embeddings [T, hidden], perhaps with more, if the model has ``num_embeddings``."""
        raise NotImplementedError

    def decoder(self, eos_ids: np.ndarray) -> NativeDecoder | None:
        """Returns a decoder that computes several steps at once, for rows that end with one of
        ``eos_ids`` [E] int64, or None."""
        return None

    def logits_of(self, slots: np.ndarray, hidden: Tensor) -> Tensor:
        """``logits`` of rows of ``slots`` [S] int64, in steps prepared by the host."""
        self.place_logits(slots)
        return self.logits(hidden)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """``forward``'s output for S of the tokens → [S, vocab_size] float32; for a model that
        pools, the states after the last norm, [S, hidden] float32."""


class TorchCausalLM(CausalLM):
    """A model that torch's operators compute, or kernels that are launched as these are: on GPUs
    too. ``state_size``: the numbers that ``forward`` gives of a token."""

    hidden_size: int
    state_size: int
    vocab_size: int

    @abstractmethod
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Writes to ``out`` [S, vocab_size] float32, if given."""
