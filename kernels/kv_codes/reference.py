"""Reference of ``quantize``."""

import torch
from torch import Tensor

# The upper bits of a byte are sign and exponent, the lower three the mantissa; the last code is
# NaN.
E4M3 = [(code % 8 / 8 + (code >= 8)) * 2.0 ** (max(code // 8, 1) - 7) for code in range(127)]


def quantize(x: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [heads, D]: the nearest code of each element; ties go to the even code."""
    highest, find = (127, round) if codes == torch.int8 else (448, _e4m3)
    scales = (x.float().abs().amax(1) / highest).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (x.float() / scales[:, None]).tolist()
    return torch.tensor([[find(each) for each in head] for head in scaled], dtype=codes), scales


def _e4m3(number: float) -> int:
    magnitude = min(range(127), key=lambda code: (abs(E4M3[code] - abs(number)), code % 2))
    return magnitude + 128 * (number < 0)
