"""Writes new keys and values into the paged cache."""

from torch import Tensor

from kernels.kv_codes import quantize


def kv_write(
    kv_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Writes key [T, H_kv, D] and value [T, H_kv, value_dim] to the entries ``slot_mapping`` [T]
    int64.

    kv_cache is [num_blocks + 1, block_size, 2, H_kv, ≥ D]; entry = block * block_size + offset. The
    last block is the null block, and several tokens may write one of its entries. With
    ``kv_scales`` [num_blocks + 1, block_size, 2, H_kv] float32 the cache is quantized
    (``kv_codes``). torch serves every device.
    """
    kv_slots = kv_cache.flatten(0, 1)  # [entries, 2, H_kv, D]
    for place, numbers in enumerate((key, value)):
        stored = numbers
        if kv_scales is not None:
            stored, scales = quantize(numbers, kv_cache.dtype)
            kv_scales.flatten(0, 1)[:, place].index_copy_(0, slot_mapping, scales)
        kv_slots[:, place, :, : stored.shape[2]].index_copy_(0, slot_mapping, stored)
