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
    """key [T, H_kv, D] and value [T, H_kv, value_dim] go to the entries ``slot_mapping`` [T] int64.

    kv_cache [num_blocks + 1, block_size, 2, H_kv, ≥ D]; entry = block * block_size + offset. The
    last block is the null block: several tokens may go to one entry of it. With ``kv_scales``
    [num_blocks + 1, block_size, 2, H_kv] float32 it has codes (``kv_codes``). torch serves every
    device.
    """
    kv_slots = kv_cache.flatten(0, 1)  # [entries, 2, H_kv, D]
    for place, numbers in enumerate((key, value)):
        stored = numbers
        if kv_scales is not None:
            stored, scales = quantize(numbers, kv_cache.dtype)
            kv_scales.flatten(0, 1)[:, place].index_copy_(0, slot_mapping, scales)
        kv_slots[:, place, :, : stored.shape[2]].index_copy_(0, slot_mapping, stored)
