"""Blocks of layers that share memory with larger ones."""

from torch import Tensor


def apart(blocks: Tensor) -> Tensor:
    """The same blocks with others between them."""
    return blocks.new_ones(len(blocks), 3, *blocks.shape[1:]).index_copy_(
        1, blocks.new_tensor([1]).long(), blocks.unsqueeze(1)
    )[:, 1]
