"""GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel store it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.weights import Weight
from services.worker.weights.checkpoint import StoredTensor
from services.worker.weights.schemes.scheme import Scheme, Stored, whole_numbers
from services.worker.weights.schemes.tools.parts import refuse_unless, unpack


class Gptq(Scheme):
    """``qweight`` [inputs · bits / 32, outputs] int32 has the codes of adjacent inputs in a word,
    ``qzeros`` [groups, outputs · bits / 32] the zeros of adjacent outputs; ``scales``
    [groups, outputs]; ``g_idx`` [inputs]. The first format stores zeros 1 lower, so that a zero of
    0 borrows from its neighbour."""

    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._bits: int = refuse_unless(config, "bits", (4, 2, 8))
        format_ = refuse_unless(config, "checkpoint_format", ("gptq", "gptq_v2"))
        self._is_lower = format_ == "gptq"

    def ignores(self, tensor: StoredTensor) -> bool:
        """Old files have biases of zeros even if the architecture has none."""
        return tensor.name.endswith(".bias") and not tensor.read_all().any()

    def holds(self, stored: Stored) -> bool:
        return "qweight" in stored

    def shape(self, stored: Stored) -> list[int]:
        num_words, outputs = stored["qweight"].shape
        return [outputs, num_words * 32 // self._bits]

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        middle = 1 << self._bits - 1
        codes = unpack(tensors["qweight"].T.contiguous(), self._bits).short() - middle
        zeros = tensors["qzeros"].long()
        if self._is_lower:
            zeros += sum(1 << shift for shift in range(0, 32, self._bits))
        zeros = unpack(zeros, self._bits).T.short() - middle
        size = self.config.get("group_size", -1)
        return whole_numbers(
            codes,
            self._bits,
            tensors["scales"].T,
            zeros,
            dtype,
            group=codes.shape[1] if size == -1 else size,
            group_of=tensors["g_idx"].long() if "g_idx" in tensors else None,
        )


SCHEME = Gptq
