"""Quantization of keys and values within kernels."""

import triton
import triton.language as tl

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32
# Adding and subtracting it rounds a float32 to an integer.
ROUND_WHOLE = tl.constexpr(1.5 * 2**23)
# The same times a power of two rounds values of that exponent to three bits of mantissa.
ROUND_MANTISSA = tl.constexpr(1.5 * 2**20)
E4M3_UNIT = tl.constexpr(256.0)  # see ``widen``


@triton.jit
def quantize(x, kind: tl.constexpr):
    """x [heads, D] float32 → codes [heads, D] of a kind, int8 or uint8, and scales [heads]."""
    highest: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
    bad = tl.sum(x * 0.0, 1)  # NaN if an element is NaN or infinite, which a maximum may miss
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), highest), TINY) + bad
    scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    scaled = tl.where((bad == 0)[:, None], scaled, 0.0)
    return _whole(scaled) if kind == tl.int8 else _e4m3(scaled), scale


@triton.jit
def _whole(x):
    return ((x + ROUND_WHOLE) - ROUND_WHOLE).to(tl.int8)


@triton.jit
def _e4m3(x):
    """The bytes of float8_e4m3fn on every GPU; |x| ≤ 448. Below 2⁻⁶ codes are multiples of 2⁻⁹."""
    bits = tl.maximum(tl.abs(x), 1 / 64).to(tl.int32, bitcast=True)
    large = (bits & 0x7F800000).to(tl.float32, bitcast=True) * ROUND_MANTISSA
    half = (((x + large) - large) * (1 / 256)).to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    return ((bits >> 8) & 0x80 | (bits >> 7) & 0x7F).to(tl.uint8)


@triton.jit
def widen(codes, dtype: tl.constexpr):
    """Codes as exact values of ``dtype``; e4m3 codes are scaled by 1/256, so that their bits are
    those of a float16."""
    if codes.dtype == tl.int8:
        return codes.to(dtype)
    bits = codes.to(tl.int16)
    half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
    return half.to(dtype)
