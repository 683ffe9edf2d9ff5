"""Models, one file a family."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from services.worker.model_config import ModelConfig


class CausalLM(nn.Module, ABC):
    """What the engine needs of a model. Attention finds its context in ``services/worker/context``.

    T tokens of a step are flattened over its rows.
    """

    clears_blocks = True  # blocks of the KV cache must be zeroed before a sequence gets them

    @abstractmethod
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[T], [T] → hidden states [T, hidden], before the last norm."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden], the states of some of the tokens → [S, vocab_size] float32."""
