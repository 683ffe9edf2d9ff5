"""Models, one file a family."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from services.worker.config.model_config import ModelConfig


class CausalLM(nn.Module, ABC):
    """What the engine needs of a model. Attention finds its context in ``layers/context.py``.

    T tokens of a step are flattened over its rows.
    """

    clears_blocks = True  # blocks of the KV cache must be zeroed before a sequence gets them
    has_mtp = False  # it has ``mtp``, with a layer of the KV cache behind those of the trunk

    @abstractmethod
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[T], [T] → hidden states [T, hidden], before the last norm."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden], the states of some of the tokens → [S, vocab_size] float32."""

    def mtp(self, hidden: Tensor, input_ids: Tensor, positions: Tensor) -> Tensor:
        """What the MTP head makes of T pairs: hidden [T, hidden], a token's state or what the head
        made of it; input_ids [T], the token after it; positions [T] of the former → [T, hidden]."""
        raise NotImplementedError

    def mtp_logits(self, out: Tensor) -> Tensor:
        """[N, hidden], some of what ``mtp`` gave → [N, vocab_size] float32."""
        raise NotImplementedError
