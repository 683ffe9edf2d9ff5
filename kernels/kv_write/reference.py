"""The readable truth of ``kv_write``."""

import torch
from torch import Tensor

# A byte's upper bits are sign and exponent, its lower three the mantissa; the last code is NaN.
E4M3 = [(code % 8 / 8 + (code >= 8)) * 2.0 ** (max(code // 8, 1) - 7) for code in range(127)]


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
                scales = kv_scales[block, offset, place]
                scales[:] = numbers.float().abs().amax(1) / (127 if _has_int8(kv_cache) else 448)
                scales.clamp_(min=torch.finfo(torch.float32).tiny)
                stored = _codes(numbers.float() / scales[:, None], kv_cache)
            kv_cache[block, offset, place, :, : stored.shape[1]] = stored


def _has_int8(kv_cache: Tensor) -> bool:
    return kv_cache.dtype == torch.int8


def _codes(scaled: Tensor, kv_cache: Tensor) -> Tensor:
    """What is nearest to each number of ``scaled`` [H_kv, D]; of two, the even one."""
    find = round if _has_int8(kv_cache) else _e4m3
    codes = [[find(number) for number in head] for head in scaled.tolist()]
    return torch.tensor(codes, dtype=kv_cache.dtype)


def _e4m3(number: float) -> int:
    magnitude = min(range(127), key=lambda code: (abs(E4M3[code] - abs(number)), code % 2))
    return magnitude + 128 * (number < 0)
