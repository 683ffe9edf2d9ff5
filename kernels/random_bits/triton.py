"""Random bits in Triton kernels, by Triton's own Philox4x32-10."""

import triton
import triton.language as tl


@triton.jit
def random_bits(seed, token_ids, position, choice, PURPOSE: tl.constexpr):
    """32 bits as uint32 for ``token_ids`` [N]; the others are scalars."""
    zeros = tl.zeros_like(token_ids).to(tl.uint32)
    words = tl.philox(
        seed,
        token_ids.to(tl.uint32),
        zeros + position.to(tl.uint32),
        zeros + choice.to(tl.uint32),
        zeros + PURPOSE,
    )
    return words[0]
