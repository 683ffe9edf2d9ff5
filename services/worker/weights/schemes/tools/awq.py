"""AWQ (arXiv 2306.00978), as AutoAWQ stores it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.weights import Weight
from services.worker.weights.schemes.scheme import Scheme, Stored, whole_numbers
from services.worker.weights.schemes.tools.parts import refuse_unless, unpack

BITS = 4
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of the codes of eight neighbouring outputs


class Awq(Scheme):
    """``qweight`` [inputs, outputs / 8] int32 and ``qzeros`` [groups, outputs / 8] have the codes
    of neighbouring outputs in a word; ``scales`` [groups, outputs]."""

    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        bits = "w_bit" if "w_bit" in config else "bits"
        refuse_unless(config, bits, (BITS,))
        version = str(config.get("version", "gemm")).lower()
        refuse_unless({"version": version}, "version", ("gemm",))

    def holds(self, stored: Stored) -> bool:
        return "qweight" in stored

    def shape(self, stored: Stored) -> list[int]:
        inputs, num_words = stored["qweight"].shape
        return [num_words * 32 // BITS, inputs]

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        codes = _by_output(tensors["qweight"])
        zeros = _by_output(tensors["qzeros"]) if "qzeros" in tensors else None
        size = self.config.get("group_size", self.config.get("q_group_size", 128))
        group = codes.shape[1] if size == -1 else size
        return whole_numbers(codes, BITS, tensors["scales"].T, zeros, dtype, group=group)


def _by_output(words: Tensor) -> Tensor:
    """[n, outputs / 8] → codes − 8 [outputs, n]"""
    codes: Tensor = unpack(words, BITS).unflatten(1, (-1, 8))[..., PLACES]
    return codes.flatten(1).T.short() - 8


SCHEME = Awq
