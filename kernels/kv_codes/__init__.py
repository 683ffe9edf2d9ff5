"""Keys and values quantized to 8 bits, with a scale for each head's key and value of a token.

A code is the nearest to x / scale with scale = max |x| / the highest code, so no other token is
involved. int8 codes are integers; uint8 codes are bytes of float8_e4m3fn, for which torch has few
operators on CPUs. NaN or infinity in x makes the scale NaN or infinite, and every dequantized value
NaN.
"""

import torch
from torch import Tensor

HIGHEST_CODE = {torch.int8: 127.0, torch.uint8: 448.0}


def quantize(x: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] → codes [..., D] and scales [...] float32."""
    values = x.float()
    scales = (values.abs().amax(-1) / HIGHEST_CODE[codes]).clamp_(min=torch.finfo().tiny)
    scaled = values / scales.unsqueeze(-1)
    if codes == torch.int8:
        return scaled.round_().to(torch.int8), scales
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [..., D] and scales [...] → dequantized [..., D]."""
    numbers = codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    return numbers.float().mul_(scales.unsqueeze(-1)).to(dtype)
