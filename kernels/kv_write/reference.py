"""The readable truth of ``kv_write``."""

from torch import Tensor


def kv_write(kv_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Token by token, in order."""
    block_size = kv_cache.shape[1]
    for token, kv_slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(kv_slot, block_size)
        kv_cache[block, offset, 0] = key[token]
        kv_cache[block, offset, 1] = value[token]
