"""Gumbel-max: the highest of score + noise is a draw from softmax(scores)."""

import torch
from torch import Tensor

from kernels.random_bits import PURPOSE_SAMPLE, random_bits

# The noise of a 24-bit uniform lies in [−2.86, 16.64]: a token further below the maximum than the
# difference, 19.5, cannot win.
MAX_GAP = 20.0

# Tokens per piece, so that temporaries stay in a core's cache: 262144 tokens at once take 47 ms on
# one core, in pieces of 32768 they take 16. It bounds their memory, too.
NUM_AT_ONCE = 32768


def gumbel_argmax(scores: Tensor, seeds: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
    """scores [N, V]; seeds, positions, choices [N] int64 → token ids [N], ties to the lowest.

    Noise is computed only for the tokens that can win.
    """
    can_win = scores >= scores.amax(-1, keepdim=True) - MAX_GAP
    noisy = torch.full_like(scores, float("-inf"))
    for candidates in torch.split(can_win.nonzero(), NUM_AT_ONCE):
        rows, tokens = candidates.unbind(1)
        bits = random_bits(seeds[rows], tokens, positions[rows], choices[rows], PURPOSE_SAMPLE)
        noisy[rows, tokens] = scores[rows, tokens] + gumbel(bits)
    return noisy.argmax(-1)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float32 from the upper 24 of 32 bits; zero counts as ½."""
    uniform = (bits >> 8).float().clamp(min=0.5) * 2.0**-24
    return -(-uniform.log()).log()
