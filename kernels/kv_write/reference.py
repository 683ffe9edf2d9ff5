"""Reference of ``kv_write``."""

from torch import Tensor

from kernels.kv_codes import reference as kv_codes


def kv_write(
    kv_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Token by token, in order."""
    block_size = kv_cache.shape[1]
    for token, kv_slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(kv_slot, block_size)
        for place, numbers in enumerate((key[token], value[token])):
            stored = numbers
            if kv_scales is not None:
                stored, scales = kv_codes.quantize(numbers, kv_cache.dtype)
                kv_scales[block, offset, place] = scales
            kv_cache[block, offset, place, :, : stored.shape[1]] = stored
