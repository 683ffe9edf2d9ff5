"""Writes new keys and values into the paged cache."""

from torch import Tensor


def kv_write(kv_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """key [T, H_kv, D] and value [T, H_kv, value_dim] go to the entries ``slot_mapping`` [T] int64.

    kv_cache [num_blocks + 1, block_size, 2, H_kv, ≥ D]; entry = block * block_size + offset. The
    last block is the null block: several tokens may go to one entry of it. torch serves every
    device.
    """
    kv_slots = kv_cache.flatten(0, 1)  # [entries, 2, H_kv, D]
    kv_slots[:, 0, :, : key.shape[2]].index_copy_(0, slot_mapping, key)
    kv_slots[:, 1, :, : value.shape[2]].index_copy_(0, slot_mapping, value)
